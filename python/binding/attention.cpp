// attention(): a call of eager torch code, one C function from Python to the launch. If a gradient is wanted, it calls
// torch's autograd function, which calls a second C function. A call that is not in the kernels' form, or that torch must
// see (a mode, a transform, a profiler), continues in Python, in flash_attention.routes.general().
#include <algorithm>

#include "arguments.h"
#include "eager.h"
#include "plain_call.h"
#include "torch_functions.h"

namespace flash_attention::python {
namespace {

PyObject* general = nullptr;  // flash_attention.routes.general
PyObject* renamed = nullptr;  // flash_attention.arguments.names.renamed

/// Options, also in the form that the backward pass in Python expects. The last ones are kept, because a model's layers
/// use the same options again.
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

/// The arguments that attention() has read when it calls torch, which calls differentiable_forward().
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

/// Arguments that no call here has.
constexpr int off_always[] = {
    alibi_slopes,  sink,         cu_seqlens_q,  cu_seqlens_kv, seqused_q,         key_lengths,   hidden_rows,
    block_mask,    left_padding, k_scale,       v_scale,       q_scale,           arg_kernel,    arg_tile,
    arg_score_mod, arg_mask_mod, arg_q_descale, arg_k_descale, arg_v_descale,     arg_out_dtype, arg_cache_dtype,
    arg_latent,    key_indices,  key_blocks,    key_counts,    arg_key_block_size,
    bit_mask,      bit_mask_offsets, sequence_windows, k_zero,     v_zero,            k_global_scale, v_global_scale};

[[maybe_unused]] bool is_zero(const Given& given, int argument) {
  PyObject* const value = given[argument];
  return given.is_off(argument) || (PyFloat_CheckExact(value) && PyFloat_AsDouble(value) == 0);
}

/// Named options are off, too, except words and flags that have another default, which read_options() reads.
bool are_named_off(const Given& given) {
#define FLASH_ATTENTION_OFF_integer(name) given.is_off(arg_##name)
#define FLASH_ATTENTION_OFF_number(name) is_zero(given, arg_##name)
#define FLASH_ATTENTION_OFF_flag(name) given.is_off(arg_##name)
#define FLASH_ATTENTION_OFF_text(name) true
#define FLASH_ATTENTION_OFF_optional_flag(name) true
#define FLASH_ATTENTION_OFF(kind, name, ...) &&FLASH_ATTENTION_OFF_##kind(name)
  return true FLASH_ATTENTION_NAMED_OPTIONS(FLASH_ATTENTION_OFF);
#undef FLASH_ATTENTION_OFF
#undef FLASH_ATTENTION_OFF_optional_flag
#undef FLASH_ATTENTION_OFF_text
#undef FLASH_ATTENTION_OFF_flag
#undef FLASH_ATTENTION_OFF_number
#undef FLASH_ATTENTION_OFF_integer
}

bool all_off(const Given& given, std::initializer_list<int> arguments) {
  return std::ranges::all_of(arguments, [&](int argument) { return given.is_off(argument); });
}

/// Whether the call is in the kernels' form and has only arguments that are read here.
bool read(const Given& given, CallOptions& options, Slots& slots) {
  if (!given.known() || !read_options(given, options) || !are_named_off(given)) return false;
  if (!std::ranges::all_of(off_always, [&](int argument) { return given.is_off(argument); })) return false;
  if (!read_tensors(given.qkv(), slots)) return false;
  if (given.over_cache()) {
    return all_off(given, {bias, mask}) && read_integers(given[seqused_kv], seqused_kv, slots) &&
           read_integers(given[page_table], page_table, slots) && fits_out(given[arg_out], slots[q]) &&
           (slots[page_table].present() || slots[k].sizes[0] == slots[q].sizes[0]) &&
           !is_intercepted(given.qkv(), slots[q].device) && !wants_gradient(given.qkv(), 3);  // which is refused
  }
  const std::int64_t keys = slots[k].sizes[options.heads_first ? 2 : 1];
  return all_off(given, {seqused_kv, page_table, arg_out}) && slots[k].sizes[0] == slots[q].sizes[0] &&
         !is_intercepted(given.qkv(), slots[q].device) && read_scores(given[bias], bias, keys, slots) &&
         read_scores(given[mask], mask, keys, slots) && !(slots[bias].present() && wants_gradient(&given.qkv()[bias], 1));
}

/// attention(q, k, v, *, ...) -> out or (out, lse).
nb::object attention(PyObject* const* args, Py_ssize_t count, PyObject* names, const Given& given) {
  CallOptions options;
  Slots slots;
  if (!read(given, options, slots))
    return checked(PyObject_Vectorcall(general, args, static_cast<std::size_t>(count), names));
  const bool with_lse = given[arg_return_lse] == Py_True;
  if (!given.over_cache() && wants_gradient(given.qkv(), 3)) {
    if (with_lse || slots[bias].present() || slots[mask].present())
      return checked(PyObject_Vectorcall(general, args, static_cast<std::size_t>(count), names));
    options.deterministic = options.deterministic || answer(torch.deterministic).ptr() == Py_True;
    return differentiate({.qkv = given.qkv(), .slots = slots, .options = options});
  }
  PyObject* const into = given.is_off(arg_out) ? Py_None : given[arg_out];
  const Results results = run_plain(given.qkv(), slots, options, {.lse = with_lse, .into = into});
  return with_lse ? nb::object(nb::make_tuple(results.out, results.lse)) : results.out;
}

/// The pending Python error, with the caller's names of arguments: `names` is {argument: the caller's name}.
void rename_error(PyObject* names) {
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  PyObject* const arguments[] = {value, names};
  PyObject* const error = PyObject_Vectorcall(renamed, arguments, 2, nullptr);
  if (error != nullptr) {
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
    Py_DECREF(error);
  }
  Py_XDECREF(type), Py_XDECREF(value), Py_XDECREF(trace);
}

PyObject* attention_or_error(PyObject*, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  const Given given(args, count, names);
  try {
    return attention(args, count, names, given).release().ptr();
  } catch (const Error&) {  // errors of the Python part are renamed there
    set_python_error(std::current_exception());
    PyObject* const others = given.names_of_caller();
    if (others != nullptr && others != Py_None) rename_error(others);
  } catch (...) {
    set_python_error(std::current_exception());
  }
  return nullptr;
}

void set(PyObject* object, PyObject* name, nb::handle value) {
  if (PyObject_SetAttr(object, name, value.ptr()) != 0) throw nb::python_error();
}

/// forward(ctx, q, k, v, options) -> out of the autograd function that `torch.differentiate` applies; its backward pass
/// finds q, k, v, out, lse among ctx.saved_tensors, and ctx.options.
nb::object differentiable_forward(PyObject* const* args, Py_ssize_t count) {
  PyObject* const* qkv = args + 1;
  if (count != 5 || pending == nullptr || !std::equal(qkv, qkv + 3, pending->qkv)) {
    throw nb::type_error("differentiable_forward: only attention() calls it, by way of torch");
  }
  const Results results = run_plain(qkv, pending->slots, pending->options, {.lse = true, .backward_follows = true});
  set(args[0], torch.to_save,
      nb::make_tuple(nb::handle(qkv[0]), nb::handle(qkv[1]), nb::handle(qkv[2]), results.out, results.lse));
  set(args[0], torch.options, args[4]);
  return results.out;
}

/// attention_backward(q, k, v, out, lse, dout, options) -> (dq, dk, dv) of a call that attention() differentiates.
nb::object attention_backward(PyObject* const* args, Py_ssize_t count) {
  if (count != 7) throw nb::type_error("attention_backward: expected q, k, v, out, lse, dout and options");
  Slots slots;
  Tensor dout;
  const bool plain = are_tensors(args + 3, 3) && read_tensors(args, slots) && !is_intercepted(args, slots[q].device) &&
                     read_tensor(args[5], "dout", dout) && is_plain(dout, slots[q]);
  if (!plain) return checked(PyObject_Vectorcall(torch.general_backward, args, static_cast<std::size_t>(count), nullptr));
  const Tensor out = tensor_of(args[3], "out"), lse = tensor_of(args[4], "lse");
  read_current(args[0], slots[q]);
  Call call(slots, options_of(args[6]));
  call.set_forward(out, lse, 0, 0);
  NewTensor results[] = {NewTensor::like(args[0], slots[q]), NewTensor::like(args[1], slots[k]),
                         NewTensor::like(args[2], slots[v])};
  Gradients gradients;
  gradients.dout = dout;
  gradients.dq = results[0].tensor, gradients.dk = results[1].tensor, gradients.dv = results[2].tensor;
  call.set_gradients(gradients);
  run_call(call, true, args[0], results);
  return nb::make_tuple(results[0].to_python(), results[1].to_python(), results[2].to_python());
}

void set_python(nb::handle general_call, nb::handle renamed_error) {
  general = general_call.inc_ref().ptr();
  renamed = renamed_error.inc_ref().ptr();
}

}  // namespace

void add_eager(nb::module_& module) {
  using namespace nb::literals;
  static PyMethodDef method{"attention", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(attention_or_error)),
                            METH_FASTCALL | METH_KEYWORDS, nullptr};
  module.attr("attention") = nb::steal(PyCFunction_NewEx(&method, nullptr, nullptr));
  module.def("set_python", set_python, "general"_a, "renamed"_a);
  add_fast<differentiable_forward>(module, "differentiable_forward");
  add_fast<attention_backward>(module, "attention_backward");
  add_arguments(module);
  add_eager_program(module);
  add_torch(module);
}

}  // namespace flash_attention::python
