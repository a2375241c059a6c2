// The short way of a plain call: torch tensors, nothing that traces. One C function from attention() to the launch, for
// calls whose work takes no longer than the way to it; where a gradient is to come, torch's autograd function lies between
// two of them. Whatever is not plain is answered with None, and the caller goes the long way, which says no where that is
// the answer.
#include "eager.h"

#include <algorithm>

#include "call.h"
#include "errors.h"
#include "torch_functions.h"

namespace flash_attention::python {
namespace {

bool is_number(nb::handle value) { return PyFloat_CheckExact(value.ptr()) || PyLong_CheckExact(value.ptr()); }

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

/// The order of attend()'s arguments, of which those from alibi_slopes on may be left out; alibi_slopes and whatever
/// follows the mask must be None.
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
  alibi_slopes,
  arg_bias,
  arg_mask
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

/// The tensors of a plain call; false where they are not plain.
bool read(PyObject* const* qkv, Slots& out) {
  if (!are_tensors(qkv, 3)) return false;
  try {
    for (int i = 0; i < 3; ++i) {
      out[i] = tensor_of(qkv[i], slot_names[i]);
      if (!is_plain(out[i], out[0])) return false;
    }
  } catch (const nb::builtin_exception&) {  // no memory behind it: torch's "meta" device, sparse tensors
    return false;
  }
  return std::equal(out[Slot::v].sizes, out[Slot::v].sizes + 3, out[Slot::k].sizes);
}

/// A bias or a mask over `keys` keys, None where there is none; false where it is not plain.
bool read_scores(PyObject* argument, Slot slot, std::int64_t keys, Slots& out) {
  if (argument == Py_None) return true;
  if (!are_tensors(&argument, 1)) return false;
  try {
    out[slot] = tensor_of(argument, slot_names[slot]);
  } catch (const nb::builtin_exception&) {
    return false;
  }
  const int last = out[slot].rank - 1;
  return last >= 0 && out[slot].sizes[last] == keys && out[slot].strides[last] == 1;
}

/// With a workspace where `like` is.
void run(Call& call, bool backward, nb::handle like) {
  nb::object workspace;
  if (const std::size_t bytes = call.workspace(backward)) {
    const nb::object size = nb::cast(bytes + Call::workspace_alignment);
    workspace = result_of(torch.workspace, {like.ptr(), size.ptr()});
    call.set_workspace(tensor_of(workspace, "workspace").data, bytes);
  }
  const nb::gil_scoped_release released;
  call.run(backward);
}

struct Results {
  nb::object out, lse;
};

Results run_plain(PyObject* const* qkv, Slots& slots, const Scalars& scalars, bool with_lse) {
  slots[Slot::q].stream = current_stream(qkv[0], slots[Slot::q].device);
  Call call(slots, scalars);
  Results results{.out = result_of(torch.empty_like, {qkv[0]}), .lse = nb::none()};
  if (with_lse) {
    results.lse = empty_lse(qkv[0], call.problem, slots[Slot::q].device);
  }
  call.set_forward(tensor_of(results.out, "out"), optional_tensor(results.lse, "lse"), 0, 0);
  run(call, false, results.out);
  return results;
}

/// Scalars with the tuple that the backward pass takes. The last ones are kept: a model's layers ask for the same again.
struct Remembered {
  Scalars scalars;
  nb::object tuple;
};

Remembered& last_scalars() {
  static auto* last = new Remembered;  // never freed: Python may be gone before static objects are
  return *last;
}

nb::object tuple_of(const Scalars& scalars) {
  Remembered& last = last_scalars();
  if (!last.tuple.is_valid() || !(last.scalars == scalars)) {
    const nb::object scale = scalars.scale ? nb::cast(*scalars.scale) : nb::none();
    last.scalars = scalars;
    last.tuple = nb::make_tuple(scalars.max_seqlen_q, scalars.max_seqlen_kv, scale, scalars.softcap, scalars.causal,
                                scalars.top_left, scalars.window_left, scalars.window_right, scalars.dropout_p,
                                scalars.deterministic, scalars.heads_first, scalars.standard, scalars.kernel,
                                scalars.mask_block_q, scalars.mask_block_kv);
  }
  return last.tuple;
}

Scalars scalars_of(nb::handle tuple) {
  const Remembered& last = last_scalars();
  return last.tuple.is_valid() && tuple.is(last.tuple) ? last.scalars : python::scalars_of(nb::borrow<nb::tuple>(tuple));
}

/// What attend() has read when it calls torch, which calls differentiable_forward().
struct Pending {
  PyObject* const* qkv;
  Slots& slots;
  const Scalars& scalars;
};
thread_local const Pending* pending = nullptr;

nb::object differentiate(const Pending& call) {
  struct Scope {
    explicit Scope(const Pending* call) { pending = call; }
    ~Scope() { pending = nullptr; }
  } const scope(&call);
  const nb::object scalars = tuple_of(call.scalars);
  return result_of(torch.differentiate, {call.qkv[0], call.qkv[1], call.qkv[2], scalars.ptr()});
}

/// attend(q, k, v, causal, window, softcap, scale, dropout_p, deterministic, layout, alignment, alibi_slopes, bias, mask,
/// *what must be None) -> out, or None where the call is not plain. A bias or a mask is, where no gradient is to come.
nb::object attend(PyObject* const* args, Py_ssize_t count) {
  if (count < alibi_slopes) throw nb::type_error("attend: too few arguments");
  for (Py_ssize_t i = alibi_slopes; i < count; ++i) {
    if (args[i] != Py_None && i != arg_bias && i != arg_mask) return nb::none();
  }
  PyObject* const bias = count > arg_bias ? args[arg_bias] : Py_None;
  PyObject* const mask = count > arg_mask ? args[arg_mask] : Py_None;
  Scalars scalars;
  Slots slots;
  if (!read(args, scalars) || !read(args, slots) || is_intercepted(slots[Slot::q].device)) return nb::none();
  const std::int64_t keys = slots[Slot::k].sizes[scalars.heads_first ? 2 : 1];
  if (!read_scores(bias, Slot::bias, keys, slots) || !read_scores(mask, Slot::mask, keys, slots)) return nb::none();
  if (bias != Py_None && wants_gradient(&bias, 1)) return nb::none();
  if (!wants_gradient(args, 3)) return run_plain(args, slots, scalars, false).out;
  if (bias != Py_None || mask != Py_None) return nb::none();
  scalars.deterministic = scalars.deterministic || answer(torch.deterministic).ptr() == Py_True;
  return differentiate({.qkv = args, .slots = slots, .scalars = scalars});
}

void set(PyObject* object, PyObject* name, nb::handle value) {
  if (PyObject_SetAttr(object, name, value.ptr()) != 0) throw nb::python_error();
}

/// forward(ctx, q, k, v, scalars) -> out of the autograd function that `torch.differentiate` applies; its backward pass
/// finds q, k, v, out, lse among ctx.saved_tensors, and ctx.scalars.
nb::object differentiable_forward(PyObject* const* args, Py_ssize_t count) {
  PyObject* const* qkv = args + 1;
  if (count != 5 || pending == nullptr || !std::equal(qkv, qkv + 3, pending->qkv)) {
    throw nb::type_error("differentiable_forward: only attend() calls it, by way of torch");
  }
  const Results results = run_plain(qkv, pending->slots, pending->scalars, true);
  set(args[0], torch.to_save,
      nb::make_tuple(nb::handle(qkv[0]), nb::handle(qkv[1]), nb::handle(qkv[2]), results.out, results.lse));
  set(args[0], torch.scalars, args[4]);
  return results.out;
}

/// attend_backward(q, k, v, out, lse, dout, scalars) -> (dq, dk, dv), or None where the call is not plain.
nb::object attend_backward(PyObject* const* args, Py_ssize_t count) {
  if (count != 7) throw nb::type_error("attend_backward: expected q, k, v, out, lse, dout and scalars");
  Slots slots;
  if (!are_tensors(args, 6) || !read(args, slots) || is_intercepted(slots[Slot::q].device)) return nb::none();
  const Tensor out = tensor_of(args[3], "out"), lse = tensor_of(args[4], "lse"), dout = tensor_of(args[5], "dout");
  if (!is_plain(dout, slots[Slot::q])) return nb::none();
  slots[Slot::q].stream = current_stream(args[0], slots[Slot::q].device);
  Call call(slots, scalars_of(args[6]));
  call.set_forward(out, lse, 0, 0);
  nb::object made[3];
  Gradients gradients;
  gradients.dout = dout;
  Tensor* const places[3] = {&gradients.dq, &gradients.dk, &gradients.dv};
  for (int i = 0; i < 3; ++i) {
    made[i] = result_of(torch.empty_like, {args[i]});
    *places[i] = tensor_of(made[i], "gradient");
  }
  call.set_gradients(gradients);
  run(call, true, made[0]);
  return nb::make_tuple(made[0], made[1], made[2]);
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

}  // namespace

void add_eager(nb::module_& module) {
  add_fast<attend>(module, "attend");
  add_fast<differentiable_forward>(module, "differentiable_forward");
  add_fast<attend_backward>(module, "attend_backward");
  add_torch(module);
}

}  // namespace flash_attention::python
