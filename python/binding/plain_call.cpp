#include "plain_call.h"

#include <algorithm>
#include <optional>

#include "gil.h"
#include "torch_functions.h"

namespace flash_attention::python {
namespace {

bool is_number(nb::handle value) { return PyFloat_CheckExact(value.ptr()) || PyLong_CheckExact(value.ptr()); }

/// Stores one bound of a window in `out`; false if it is neither None nor an int.
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

/// 0 or 1 if `value` is the first or second word, -1 otherwise.
int which(nb::handle value, const char* zero, const char* one) {
  if (!PyUnicode_CheckExact(value.ptr())) return -1;
  if (PyUnicode_CompareWithASCIIString(value.ptr(), zero) == 0) return 0;
  return PyUnicode_CompareWithASCIIString(value.ptr(), one) == 0 ? 1 : -1;
}

/// Reads a precision; false if the word names none.
bool read_precision(PyObject* value, std::string& out) {
  if (value == nullptr) return true;
  if (!PyUnicode_CheckExact(value)) return false;
  for (const char* word : {"auto", "ieee", "fast", "tf32"}) {
    if (PyUnicode_CompareWithASCIIString(value, word) != 0) continue;
    out = word;
    return true;
  }
  return false;
}

/// Where the results are.
void set_results(Call& call, bool backward, std::span<const NewTensor> results) {
  if (backward) {
    call.buffers.dq = results[0].tensor.data;
    call.buffers.dk = results[1].tensor.data;
    call.buffers.dv = results[2].tensor.data;
  } else {
    call.buffers.out = results[0].tensor.data;
    call.buffers.lse = static_cast<float*>(results[1].tensor.data);
  }
}

}  // namespace

bool read_options(const Given& given, CallOptions& out) {
  const auto flag = [&](int argument, bool& value) {
    PyObject* const word = given[argument];
    value = word == Py_True;
    return word == nullptr || PyBool_Check(word);
  };
  const auto number = [&](int argument, float& value) {
    if (given[argument] == nullptr) return true;
    if (!is_number(given[argument])) return false;
    value = static_cast<float>(PyFloat_AsDouble(given[argument]));
    return true;
  };
  const auto word = [&](int argument, const char* zero, const char* one, bool& value) {
    if (given[argument] == nullptr) return true;
    const int found = which(given[argument], zero, one);
    value = found == 1;
    return found >= 0;
  };
  if (PyObject* const asked = given[arg_invariant]; asked != nullptr && asked != Py_None) {
    if (!PyBool_Check(asked)) return false;
    out.invariant = asked == Py_True;
  }
  if (PyObject* const sides = given[arg_window]) {
    if (!PyTuple_CheckExact(sides) || PyTuple_Size(sides) != 2) return false;
    if (!read_bound(PyTuple_GetItem(sides, 0), out.window_left)) return false;
    if (!read_bound(PyTuple_GetItem(sides, 1), out.window_right)) return false;
  }
  if (PyObject* const factor = given[arg_scale]; factor != nullptr && factor != Py_None) {
    if (!is_number(factor)) return false;
    out.scale = static_cast<float>(PyFloat_AsDouble(factor));
  }
  return flag(arg_causal, out.causal) && flag(arg_deterministic, out.deterministic) && number(arg_softcap, out.softcap) &&
         number(arg_dropout_p, out.dropout_p) && out.dropout_p == 0 && word(arg_layout, "bshd", "bhsd", out.heads_first) &&
         word(arg_alignment, "bottom_right", "top_left", out.top_left) &&
         read_precision(given[arg_precision], out.precision);
}

bool read_tensor(PyObject* object, const char* name, Tensor& out) {
  try {
    out = tensor_of(object, name);
    return true;
  } catch (const Error&) {  // torch's "meta" device, sparse tensors, torch.autograd.grad(is_grads_batched=True)
    return false;
  }
}

bool is_plain(const Tensor& tensor, const Tensor& q) {
  if (tensor.rank != 4 || tensor.strides[3] != 1 || !known_dtype(tensor)) return false;
  const std::int64_t head_dim = tensor.sizes[3];
  if (head_dim % 8 != 0 || head_dim > max_head_dim || head_dim != q.sizes[3]) return false;
  return tensor.sizes[0] > 0 && tensor.sizes[1] > 0 && tensor.sizes[2] > 0 && head_dim > 0;
}

bool read_tensors(PyObject* const* qkv, Slots& out) {
  if (!are_tensors(qkv, 3)) return false;
  for (int i = 0; i < 3; ++i) {
    if (!read_tensor(qkv[i], slot_names[i], out[i]) || !is_plain(out[i], out[0])) return false;
  }
  return std::equal(out[Slot::v].sizes, out[Slot::v].sizes + 3, out[Slot::k].sizes);
}

bool read_scores(PyObject* argument, Slot slot, std::int64_t keys, Slots& out) {
  if (argument == nullptr || argument == Py_None) return true;
  if (!are_tensors(&argument, 1) || !read_tensor(argument, slot_names[slot], out[slot])) return false;
  const int last = out[slot].rank - 1;
  return last >= 0 && out[slot].sizes[last] == keys && out[slot].strides[last] == 1;
}

bool read_integers(PyObject* argument, Slot slot, Slots& out) {
  if (argument == nullptr || argument == Py_None) return true;
  if (!are_tensors(&argument, 1) || !read_tensor(argument, slot_names[slot], out[slot])) return false;
  return out[slot].is_dtype(nb::dlpack::dtype_code::Int, 32);
}

bool fits_out(PyObject* argument, const Tensor& q) {
  if (argument == nullptr || argument == Py_None) return true;
  Tensor out;
  if (!are_tensors(&argument, 1) || !read_tensor(argument, "out", out)) return false;
  return is_plain(out, q) && known_dtype(out) == known_dtype(q) && std::equal(out.sizes, out.sizes + 4, q.sizes);
}

void run_call(Call& call, bool backward, PyObject* like, std::span<NewTensor> results) {
  std::optional<Scratch> workspace;
  const std::size_t bytes = call.plan(backward);
  if (bytes > 0) workspace.emplace(bytes + Call::workspace_alignment, call.options.device, call.options.stream);
  const auto make_and_run = [&] {
    const GilRelease released;  // memory may have to come from the driver, and a launch may have to wait
    for (NewTensor& result : results) {
      if (!result.make()) return false;
    }
    if (workspace && !workspace->make()) return false;
    set_results(call, backward, results);
    if (workspace) call.set_workspace(workspace->data(), bytes);
    call.run();
    return true;
  };
  if (make_and_run()) return;
  for (NewTensor& result : results) result.make_by_python();
  if (workspace) workspace->make_by_python(like);
  make_and_run();
}

Results run_plain(PyObject* const* qkv, Slots& slots, const CallOptions& options, const Wanted& wanted) {
  Tensor& q = slots[Slot::q];
  read_current(qkv[0], q);
  Call call(slots, options);
  call.options.backward_follows = wanted.backward_follows;
  NewTensor results[] = {
      wanted.into == Py_None ? NewTensor::like(qkv[0], q) : NewTensor::given(wanted.into, tensor_of(wanted.into, "out")),
      wanted.lse ? NewTensor::lse_of(qkv[0], call.problem, q.device) : NewTensor()};
  call.set_forward(results[0].tensor, results[1].tensor, 0, 0);
  run_call(call, false, qkv[0], results);
  return {.out = results[0].to_python(), .lse = results[1].to_python()};
}

}  // namespace flash_attention::python
