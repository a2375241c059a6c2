// The fast path of a plain call: torch tensors, nothing that traces. One C function from attention() to the launch, for
// calls whose work takes no longer than the way to it; where a gradient is to come, torch's autograd function is between
// two of them. Whatever is not plain is answered with None, and the caller takes the general path, which says no where that
// is the answer.
#include "eager.h"

#include <algorithm>

#include "plain_call.h"
#include "torch_functions.h"

namespace flash_attention::python {
namespace {

/// Options with the form that Python's side of the backward pass takes. The last ones are kept: a model's layers ask for
/// the same again.
struct Remembered {
  CallOptions options;
  nb::object named;
};

Remembered& last_options() {
  static auto* last = new Remembered;  // never freed: Python may be gone before static objects are
  return *last;
}

nb::object named_options(const CallOptions& options) {
  Remembered& last = last_options();
  if (!last.named.is_valid() || !(last.options == options)) {
    last.named = checked(PyObject_CallObject(torch.named_options, tuple_of(options).ptr()));
    last.options = options;
  }
  return last.named;
}

CallOptions options_of(nb::handle named) {
  const Remembered& last = last_options();
  return last.named.is_valid() && named.is(last.named) ? last.options : python::options_of(nb::borrow<nb::tuple>(named));
}

/// What attend() has read when it calls torch, which calls differentiable_forward().
struct Pending {
  PyObject* const* qkv;
  Slots& slots;
  const CallOptions& options;
};
thread_local const Pending* pending = nullptr;

nb::object differentiate(const Pending& call) {
  struct Scope {
    explicit Scope(const Pending* call) { pending = call; }
    ~Scope() { pending = nullptr; }
  } const scope(&call);
  const nb::object options = named_options(call.options);
  return result_of(torch.differentiate, {call.qkv[0], call.qkv[1], call.qkv[2], options.ptr()});
}

/// attend(q, k, v, causal, window, softcap, scale, dropout_p, deterministic, layout, alignment, alibi_slopes, bias, mask,
/// *what must be None) -> out, or None where the call is not plain. A bias or a mask is, where no gradient is to come.
nb::object attend(PyObject* const* args, Py_ssize_t count) {
  if (count < arg_alibi_slopes) throw nb::type_error("attend: too few arguments");
  for (Py_ssize_t i = arg_alibi_slopes; i < count; ++i) {
    if (args[i] != Py_None && i != arg_bias && i != arg_mask) return nb::none();
  }
  PyObject* const bias = count > arg_bias ? args[arg_bias] : Py_None;
  PyObject* const mask = count > arg_mask ? args[arg_mask] : Py_None;
  CallOptions options;
  Slots slots;
  if (!read_options(args, options) || !read_plain(args, slots)) return nb::none();
  const std::int64_t keys = slots[Slot::k].sizes[options.heads_first ? 2 : 1];
  if (!read_scores(bias, Slot::bias, keys, slots) || !read_scores(mask, Slot::mask, keys, slots)) return nb::none();
  if (bias != Py_None && wants_gradient(&bias, 1)) return nb::none();
  if (!wants_gradient(args, 3)) return run_plain(args, slots, options, {}).out;
  if (bias != Py_None || mask != Py_None) return nb::none();
  options.deterministic = options.deterministic || answer(torch.deterministic).ptr() == Py_True;
  return differentiate({.qkv = args, .slots = slots, .options = options});
}

void set(PyObject* object, PyObject* name, nb::handle value) {
  if (PyObject_SetAttr(object, name, value.ptr()) != 0) throw nb::python_error();
}

/// forward(ctx, q, k, v, options) -> out of the autograd function that `torch.differentiate` applies; its backward pass
/// finds q, k, v, out, lse among ctx.saved_tensors, and ctx.options.
nb::object differentiable_forward(PyObject* const* args, Py_ssize_t count) {
  PyObject* const* qkv = args + 1;
  if (count != 5 || pending == nullptr || !std::equal(qkv, qkv + 3, pending->qkv)) {
    throw nb::type_error("differentiable_forward: only attend() calls it, by way of torch");
  }
  const Results results = run_plain(qkv, pending->slots, pending->options, {.lse = true, .backward_follows = true});
  set(args[0], torch.to_save,
      nb::make_tuple(nb::handle(qkv[0]), nb::handle(qkv[1]), nb::handle(qkv[2]), results.out, results.lse));
  set(args[0], torch.options, args[4]);
  return results.out;
}

/// attend_backward(q, k, v, out, lse, dout, options) -> (dq, dk, dv), or None where the call is not plain.
nb::object attend_backward(PyObject* const* args, Py_ssize_t count) {
  if (count != 7) throw nb::type_error("attend_backward: expected q, k, v, out, lse, dout and options");
  Slots slots;
  if (!are_tensors(args + 3, 3) || !read_plain(args, slots)) return nb::none();
  Tensor dout;
  try {
    dout = tensor_of(args[5], "dout");
  } catch (const nb::builtin_exception&) {  // no memory of its own: torch.autograd.grad(is_grads_batched=True)
    return nb::none();
  }
  if (!is_plain(dout, slots[Slot::q])) return nb::none();
  const Tensor out = tensor_of(args[3], "out"), lse = tensor_of(args[4], "lse");
  read_current(args[0], slots[Slot::q]);
  Call call(slots, options_of(args[6]));
  call.set_forward(out, lse, 0, 0);
  NewTensor results[] = {NewTensor::like(args[0], slots[Slot::q]), NewTensor::like(args[1], slots[Slot::k]),
                         NewTensor::like(args[2], slots[Slot::v])};
  Gradients gradients;
  gradients.dout = dout;
  gradients.dq = results[0].tensor, gradients.dk = results[1].tensor, gradients.dv = results[2].tensor;
  call.set_gradients(gradients);
  run_call(call, true, args[0], results);
  return nb::make_tuple(results[0].to_python(), results[1].to_python(), results[2].to_python());
}

}  // namespace

void add_eager(nb::module_& module) {
  add_fast<attend>(module, "attend");
  add_fast<differentiable_forward>(module, "differentiable_forward");
  add_fast<attend_backward>(module, "attend_backward");
  add_eager_cache(module);
  add_eager_program(module);
  add_torch(module);
}

}  // namespace flash_attention::python
