// The short way of a plain call: torch tensors, no gradient, nothing that traces. One C function from attention() to the
// launch, for calls whose work takes no longer than the way to it. Whatever is not plain is answered with None, and the
// caller goes the long way, which says no where that is the answer.
#include "eager.h"

#include <vector>

#include "call.h"
#include "errors.h"

namespace flash_attention::python {
namespace {

/// What torch is, given once by set_eager() and kept for the life of the process.
struct Torch {
  PyTypeObject* tensor = nullptr;
  PyObject* empty_like = nullptr;
  PyObject* empty_lse = nullptr;        // (like, batch, heads, seq) -> a float32 tensor
  PyObject* workspace = nullptr;        // (like, bytes) -> a tensor of that many bytes
  PyObject* grad_enabled = nullptr;     // () -> bool
  std::vector<PyObject*> interceptors;  // each () -> something true, or not None, where calls are not to run as they are
  PyObject* requires_grad = nullptr;    // the attribute's name
} torch;

nb::object answer(PyObject* function) {
  PyObject* result = PyObject_CallNoArgs(function);
  if (result == nullptr) throw nb::python_error();
  return nb::steal(result);
}

bool is_number(nb::handle value) { return PyFloat_CheckExact(value.ptr()) || PyLong_CheckExact(value.ptr()); }

bool is_intercepted() {
  for (PyObject* interceptor : torch.interceptors) {
    const nb::object found = answer(interceptor);
    if (!found.is_none() && PyObject_IsTrue(found.ptr()) != 0) return true;
  }
  return false;
}

bool wants_gradient(PyObject* const* qkv) {
  if (answer(torch.grad_enabled).ptr() != Py_True) return false;
  for (int i = 0; i < 3; ++i) {
    PyObject* flag = PyObject_GetAttr(qkv[i], torch.requires_grad);
    if (flag == nullptr) throw nb::python_error();
    if (nb::steal(flag).ptr() != Py_False) return true;
  }
  return false;
}

/// One bound of a window into `out`; false where it is neither None nor an int.
bool read_bound(nb::handle value, std::int64_t& out) {
  if (value.is_none()) return true;
  if (!PyLong_CheckExact(value.ptr())) return false;
  out = PyLong_AsLongLong(value.ptr());
  if (out == -1 && PyErr_Occurred()) {
    PyErr_Clear();
    return false;
  }
  return true;
}

/// 0 or 1 for the word that `value` is, -1 for any other.
int which(nb::handle value, const char* zero, const char* one) {
  if (!PyUnicode_CheckExact(value.ptr())) return -1;
  if (PyUnicode_CompareWithASCIIString(value.ptr(), zero) == 0) return 0;
  return PyUnicode_CompareWithASCIIString(value.ptr(), one) == 0 ? 1 : -1;
}

/// The order of attend()'s arguments; whatever follows must be None.
enum Argument {
  arg_q,
  arg_k,
  arg_v,
  causal,
  window,
  softcap,
  scale,
  dropout_p,
  deterministic,
  layout,
  alignment,
  num_arguments
};

bool read(PyObject* const* args, Scalars& out) {
  const nb::handle sides = args[window], cap = args[softcap], factor = args[scale], drop = args[dropout_p];
  const int heads_first = which(args[layout], "bshd", "bhsd");
  const int top_left = which(args[alignment], "bottom_right", "top_left");
  if (heads_first < 0 || top_left < 0 || !PyBool_Check(args[causal]) || !PyBool_Check(args[deterministic])) return false;
  if (!PyTuple_CheckExact(sides.ptr()) || PyTuple_Size(sides.ptr()) != 2) return false;
  if (!read_bound(PyTuple_GetItem(sides.ptr(), 0), out.window_left)) return false;
  if (!read_bound(PyTuple_GetItem(sides.ptr(), 1), out.window_right)) return false;
  if (!is_number(cap) || !is_number(drop) || PyFloat_AsDouble(drop.ptr()) != 0) return false;
  if (!factor.is_none()) {
    if (!is_number(factor)) return false;
    out.scale = static_cast<float>(PyFloat_AsDouble(factor.ptr()));
  }
  out.softcap = static_cast<float>(PyFloat_AsDouble(cap.ptr()));
  out.causal = args[causal] == Py_True;
  out.deterministic = args[deterministic] == Py_True;
  out.heads_first = heads_first == 1;
  out.top_left = top_left == 1;
  return true;
}

/// Four axes, none of them empty, with the batch and head dimension of q; a type and a head dimension for the kernels.
bool is_plain(const Tensor& tensor, const Tensor& q) {
  if (tensor.rank != 4 || tensor.strides[3] != 1 || !known_dtype(tensor)) return false;
  const std::int64_t head_dim = tensor.sizes[3];
  if (head_dim % 8 != 0 || head_dim > 256 || head_dim != q.sizes[3] || tensor.sizes[0] != q.sizes[0]) return false;
  return tensor.sizes[0] > 0 && tensor.sizes[1] > 0 && tensor.sizes[2] > 0 && head_dim > 0;
}

/// What a function of Python gives for these arguments.
template <std::size_t count>
nb::object result_of(PyObject* function, PyObject* const (&args)[count]) {
  PyObject* result = PyObject_Vectorcall(function, args, count, nullptr);
  if (result == nullptr) throw nb::python_error();
  return nb::steal(result);
}

/// out, or (out, lse); None where the call is not plain, NotImplemented where all that it wants besides is a gradient.
nb::object run_plain(PyObject* const* qkv, const Scalars& scalars, bool with_lse) {
  if (is_intercepted()) return nb::none();
  if (wants_gradient(qkv)) return nb::borrow(Py_NotImplemented);
  Slots slots;
  for (int i = 0; i < 3; ++i) {
    slots[i] = tensor_of(qkv[i], slot_names[i]);
    if (!is_plain(slots[i], slots[0])) return nb::none();
  }
  slots[Slot::q].stream = current_stream(qkv[0], slots[Slot::q].device);
  Call call(slots, scalars);
  const nb::object out = result_of(torch.empty_like, {qkv[0]});
  nb::object lse = nb::none(), workspace;
  if (with_lse) {
    const nb::int_ batch(call.problem.batch), heads(call.problem.heads_q), seq(call.problem.seq_q);
    lse = result_of(torch.empty_lse, {qkv[0], batch.ptr(), heads.ptr(), seq.ptr()});
  }
  call.set_forward(tensor_of(out, "out"), optional_tensor(lse, "lse"), 0, 0);
  if (const std::size_t bytes = call.workspace(false)) {
    const nb::object size = nb::cast(bytes + Call::workspace_alignment);
    workspace = result_of(torch.workspace, {out.ptr(), size.ptr()});
    call.set_workspace(tensor_of(workspace, "workspace").data, bytes);
  }
  {
    const nb::gil_scoped_release released;
    call.run(false);
  }
  return with_lse ? nb::object(nb::make_tuple(out, lse)) : out;
}

bool are_tensors(PyObject* const* qkv) {
  return Py_TYPE(qkv[0]) == torch.tensor && Py_TYPE(qkv[1]) == torch.tensor && Py_TYPE(qkv[2]) == torch.tensor;
}

/// attend(q, k, v, causal, window, softcap, scale, dropout_p, deterministic, layout, alignment, *what must be None) -> out
nb::object attend(PyObject* const* args, Py_ssize_t count) {
  if (count < num_arguments) throw nb::type_error("attend: too few arguments");
  if (!are_tensors(args)) return nb::none();
  for (Py_ssize_t i = num_arguments; i < count; ++i) {
    if (args[i] != Py_None) return nb::none();
  }
  Scalars scalars;
  return read(args, scalars) ? run_plain(args, scalars, false) : nb::none();
}

/// attend_with_lse(q, k, v, scalars of the binding) -> (out, lse)
nb::object attend_with_lse(PyObject* const* args, Py_ssize_t count) {
  if (count != 4) throw nb::type_error("attend_with_lse: expected q, k, v and scalars");
  if (!are_tensors(args)) return nb::none();
  const Scalars scalars = scalars_of(nb::borrow<nb::tuple>(args[3]));
  const bool plain = scalars.dropout_p == 0 && !scalars.standard && scalars.kernel.empty();
  return plain ? run_plain(args, scalars, true) : nb::none();
}

template <nb::object (*function)(PyObject* const*, Py_ssize_t)>
PyObject* or_error(PyObject*, PyObject* const* args, Py_ssize_t count) {
  try {
    return function(args, count).release().ptr();
  } catch (...) {
    set_python_error(std::current_exception());
    return nullptr;
  }
}

template <nb::object (*function)(PyObject* const*, Py_ssize_t)>
void add_fast(nb::module_& module, const char* name) {
  static PyMethodDef method{name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(or_error<function>)),
                            METH_FASTCALL, nullptr};
  module.attr(name) = nb::steal(PyCFunction_NewEx(&method, nullptr, nullptr));
}

void set_eager(nb::handle tensor, nb::handle empty_like, nb::handle empty_lse, nb::handle workspace,
               nb::handle grad_enabled, nb::tuple interceptors) {
  torch.tensor = reinterpret_cast<PyTypeObject*>(tensor.inc_ref().ptr());
  torch.empty_like = empty_like.inc_ref().ptr();
  torch.empty_lse = empty_lse.inc_ref().ptr();
  torch.workspace = workspace.inc_ref().ptr();
  torch.grad_enabled = grad_enabled.inc_ref().ptr();
  torch.requires_grad = PyUnicode_InternFromString("requires_grad");
  torch.interceptors.clear();
  for (nb::handle interceptor : interceptors) torch.interceptors.push_back(interceptor.inc_ref().ptr());
}

}  // namespace

void add_eager(nb::module_& module) {
  using namespace nb::literals;
  add_fast<attend>(module, "attend");
  add_fast<attend_with_lse>(module, "attend_with_lse");
  module.def("set_eager", set_eager, "tensor"_a, "empty_like"_a, "empty_lse"_a, "workspace"_a, "grad_enabled"_a,
             "interceptors"_a);
}

}  // namespace flash_attention::python
