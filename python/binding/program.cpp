#include "program.h"

#include <nanobind/stl/vector.h>

namespace flash_attention::python {

ProgramArguments::ProgramArguments(nb::handle program, Call& call) {
  if (program.is_none()) return;
  const auto parts = nb::cast<nb::tuple>(program);
  call.problem.program = nb::cast<std::string>(parts[0]);
  const auto tensors = nb::cast<nb::tuple>(parts[1]);
  numbers_ = nb::cast<std::vector<double>>(parts[2]);
  const std::size_t count = nb::len(tensors);
  if (count > most) refuse_value("program", "at most 8 tensors can be captured");
  for (std::size_t n = 0; n < count; ++n) {
    const Tensor& tensor = tensors_.emplace_back(tensor_of(tensors[n], "a captured tensor"));
    if (!(tensor.device == call.options.device)) {
      throw nb::value_error(("a captured tensor, " + tensor.describe() + ", is on " + to_string(tensor.device) +
                             "; q is on " + to_string(call.options.device) + ", and all must be on one device")
                                .c_str());
    }
    if (tensor.rank > 4) refuse_value("program", "a captured tensor has at most 4 axes");
    for (int axis = 0; axis < tensor.rank; ++axis) call.problem.program_sizes[n][axis] = tensor.sizes[axis];
    pointers_[n] = tensor.data;
  }
  call.buffers.program_tensors = pointers_.data();
  call.buffers.program_scalars = numbers_.data();
  if (nb::len(parts) < 4) return;
  const auto gradients = nb::cast<nb::tuple>(parts[3]);
  for (std::size_t n = 0; n < count; ++n) {
    if (gradients[n].is_none()) continue;
    const Tensor& gradient = tensors_.emplace_back(tensor_of(gradients[n], "the gradient of a captured tensor", true));
    gradients_[n] = static_cast<float*>(gradient.data);
    call.problem.program_gradients |= 1u << n;
  }
  call.buffers.program_gradients = gradients_.data();
}

}  // namespace flash_attention::python
