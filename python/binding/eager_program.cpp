// Both passes of a call with a program: torch tensors, no tracing, only q, k, v and the tensors that the program captures.
// As attention.cpp, but torch's autograd function is in Python (flash_attention/flex/passes.py), and calls both passes
// here.
#include "call/kept_masks.h"
#include "eager.h"
#include "plain_call.h"
#include "program.h"
#include "torch_functions.h"

namespace flash_attention::python {
namespace {

/// q, k and v, and the stream of the call; false if the call is not plain.
bool read_with_stream(PyObject* const* qkv, Slots& slots) {
  const bool plain = read_tensors(qkv, slots) && slots[Slot::k].sizes[0] == slots[Slot::q].sizes[0];
  if (!plain || is_intercepted(qkv, slots[Slot::q].device)) return false;
  read_current(qkv[0], slots[Slot::q]);
  return true;
}

/// program_forward(q, k, v, options, program, with_lse, backward, kept, general) -> (out, lse or None, (seed, offset));
/// the result of general() if the call is not plain. `program` has the form of ProgramArguments. `backward` is None or, if
/// a backward pass follows, has a bit for each captured tensor that needs a gradient. `kept` is None or KeptMasks.
nb::object program_forward(PyObject* const* args, Py_ssize_t count) {
  if (count != 9) throw nb::type_error("program_forward: expected 9 arguments");
  Slots slots;
  if (!read_with_stream(args, slots)) return answer(args[8]);
  Call call(slots, options_of(nb::borrow<nb::tuple>(args[3])));
  const ProgramArguments captured(args[4], call);
  if (args[6] != Py_None) {
    call.options.backward_follows = true;
    call.problem.program_gradients = nb::cast<std::uint32_t>(nb::handle(args[6]));
  }
  NewTensor results[] = {
      NewTensor::like(args[0], slots[Slot::q]),
      args[5] == Py_True ? NewTensor::lse_of(args[0], call.problem, slots[Slot::q].device) : NewTensor()};
  call.set_forward(results[0].tensor, results[1].tensor, 0, 0);
  call.choose(false);
  const nb::object prepared = use_kept(args[7], call, false, nb::none(), nb::cast<nb::tuple>(nb::handle(args[4]))[1]);
  run_call(call, false, args[0], results);
  return nb::make_tuple(results[0].to_python(), results[1].to_python(), nb::make_tuple(0, 0));
}

/// program_backward(q, k, v, out, lse, dout, dlse, options, program, kept, general) -> (dq, dk, dv); the result of
/// general() if the call is not plain. `program` has the tensors for gradients of captured tensors; dlse may be None.
nb::object program_backward(PyObject* const* args, Py_ssize_t count) {
  if (count != 11) throw nb::type_error("program_backward: expected 11 arguments");
  Slots slots;
  Gradients gradients;
  const bool plain = are_tensors(args + 3, 3) && read_with_stream(args, slots) &&
                     read_tensor(args[5], "dout", gradients.dout) && is_plain(gradients.dout, slots[Slot::q]) &&
                     (args[6] == Py_None || read_tensor(args[6], "dlse", gradients.dlse));
  if (!plain) return answer(args[10]);
  Call call(slots, options_of(nb::borrow<nb::tuple>(args[7])));
  const ProgramArguments captured(args[8], call);
  call.set_forward(tensor_of(args[3], "out"), tensor_of(args[4], "lse"), 0, 0);
  NewTensor results[] = {NewTensor::like(args[0], slots[Slot::q]), NewTensor::like(args[1], slots[Slot::k]),
                         NewTensor::like(args[2], slots[Slot::v])};
  gradients.dq = results[0].tensor, gradients.dk = results[1].tensor, gradients.dv = results[2].tensor;
  call.set_gradients(gradients);
  call.choose(true);
  const nb::object prepared = use_kept(args[9], call, true, nb::none(), nb::cast<nb::tuple>(nb::handle(args[8]))[1]);
  run_call(call, true, args[0], results);
  return nb::make_tuple(results[0].to_python(), results[1].to_python(), results[2].to_python());
}

}  // namespace

void add_eager_program(nb::module_& module) {
  add_fast<program_forward>(module, "program_forward");
  add_fast<program_backward>(module, "program_backward");
}

}  // namespace flash_attention::python
