#include "torch_functions.h"

#include <algorithm>
#include <array>

namespace flash_attention::python {

Torch torch;

bool is_intercepted(Device device) {
  const auto is_on = [](PyObject* mode) {
    const nb::object found = answer(mode);
    return found.ptr() != Py_False && PyObject_IsTrue(found.ptr()) != 0;
  };
  if (is_on(device_traits(device).host_memory ? torch.autocast : torch.autocast_of_cuda)) return true;
  if (std::ranges::any_of(torch.interceptors, is_on)) return true;
  PyObject* const profiled = PyDict_GetItem(torch.profiler, torch.is_profiler_enabled);  // it sees what is dispatched
  if (profiled == Py_True) return true;
  PyObject* const level = PyDict_GetItem(torch.forward_ad, torch.current_level);  // of forward-mode derivatives, or -1
  return level != nullptr && PyLong_AsLong(level) >= 0;
}

bool wants_gradient(PyObject* const* tensors, int count) {
  if (answer(torch.grad_enabled).ptr() != Py_True) return false;
  for (int i = 0; i < count; ++i) {
    if (checked(PyObject_GetAttr(tensors[i], torch.requires_grad)).ptr() != Py_False) return true;
  }
  return false;
}

bool are_tensors(PyObject* const* objects, int count) {
  for (int i = 0; i < count; ++i) {
    if (Py_TYPE(objects[i]) != torch.tensor) return false;
  }
  return true;
}

namespace {

/// A tensor of these sizes that holds one element: torch makes one like another faster than from sizes.
nb::object model_of(PyObject* like, const nb::tuple& sizes, const nb::tuple& strides, PyObject* dtype) {
  static PyObject* const names = nb::make_tuple("dtype", "device").release().ptr();
  const nb::object place = checked(PyObject_GetAttr(like, torch.device));
  PyObject* const args[] = {sizes.ptr(), strides.ptr(), dtype, place.ptr()};
  return checked(PyObject_Vectorcall(torch.empty_strided, args, 2, names));
}

}  // namespace

nb::object empty_lse(PyObject* like, const Problem& problem, Device device) {
  struct Model {
    std::int64_t batch = 0, heads = 0, seq = 0;
    Device device;
    nb::object tensor;
  };
  static auto* last = new Model;  // never freed: Python may be gone before static objects are
  if (last->batch != problem.batch || last->heads != problem.heads_q || last->seq != problem.seq_q ||
      !(last->device == device) || !last->tensor.is_valid()) {
    last->tensor = model_of(like, nb::make_tuple(problem.batch, problem.heads_q, problem.seq_q), nb::make_tuple(0, 0, 0),
                            torch.float32);
    last->batch = problem.batch, last->heads = problem.heads_q, last->seq = problem.seq_q, last->device = device;
  }
  return result_of(torch.empty_like, {last->tensor.ptr()});
}

nb::object empty_bytes(PyObject* like, std::size_t bytes, Device device) {
  struct Model {
    std::size_t bytes = 0;
    Device device;
    nb::object tensor;
  };
  static auto* models = new std::array<Model, 4>;  // layers of a model differ in few sizes
  static std::size_t oldest = 0;
  for (const Model& model : *models) {
    if (model.bytes == bytes && model.device == device) return result_of(torch.empty_like, {model.tensor.ptr()});
  }
  Model& model = (*models)[oldest++ % models->size()];
  model = {bytes, device, model_of(like, nb::make_tuple(bytes), nb::make_tuple(0), torch.uint8)};
  return result_of(torch.empty_like, {model.tensor.ptr()});
}

namespace {

void set_eager(nb::handle tensor, nb::handle empty_like, nb::handle empty_strided, nb::handle float32, nb::handle uint8,
               nb::handle grad_enabled, nb::handle deterministic, nb::handle differentiate, nb::handle autocast,
               nb::handle autocast_of_cuda, nb::tuple interceptors, nb::dict forward_ad, nb::dict profiler,
               nb::handle options) {
  torch.tensor = reinterpret_cast<PyTypeObject*>(tensor.inc_ref().ptr());
  torch.empty_like = empty_like.inc_ref().ptr();
  torch.empty_strided = empty_strided.inc_ref().ptr();
  torch.float32 = float32.inc_ref().ptr();
  torch.uint8 = uint8.inc_ref().ptr();
  torch.grad_enabled = grad_enabled.inc_ref().ptr();
  torch.deterministic = deterministic.inc_ref().ptr();
  torch.differentiate = differentiate.inc_ref().ptr();
  torch.requires_grad = PyUnicode_InternFromString("requires_grad");
  torch.device = PyUnicode_InternFromString("device");
  torch.to_save = PyUnicode_InternFromString("to_save");
  torch.current_level = PyUnicode_InternFromString("_current_level");
  torch.forward_ad = forward_ad.inc_ref().ptr();
  torch.is_profiler_enabled = PyUnicode_InternFromString("_is_profiler_enabled");
  torch.profiler = profiler.inc_ref().ptr();
  torch.options = PyUnicode_InternFromString("options");
  torch.named_options = options.inc_ref().ptr();
  torch.autocast = autocast.inc_ref().ptr();
  torch.autocast_of_cuda = autocast_of_cuda.inc_ref().ptr();
  torch.interceptors.clear();
  for (nb::handle interceptor : interceptors) torch.interceptors.push_back(interceptor.inc_ref().ptr());
}

}  // namespace

void add_torch(nb::module_& module) {
  using namespace nb::literals;
  module.def("set_eager", set_eager, "tensor"_a, "empty_like"_a, "empty_strided"_a, "float32"_a, "uint8"_a,
             "grad_enabled"_a, "deterministic"_a, "differentiate"_a, "autocast"_a, "autocast_of_cuda"_a, "interceptors"_a,
             "forward_ad"_a, "profiler"_a, "options"_a);
}

}  // namespace flash_attention::python
