#pragma once

#include <nanobind/nanobind.h>

#include <span>

#include "call/call.h"
#include "errors.h"
#include "torch_functions.h"

// What the fast paths of a plain call share (eager.cpp, eager_cache.cpp): its arguments as Python gives them, and its run.

namespace flash_attention::python {

/// The order of arguments. Of attend(), those from arg_alibi_slopes on may be left out; that one and whatever follows the
/// mask must be None.
enum Argument {
  arg_q,
  arg_k,
  arg_v,
  arg_causal,
  arg_window,
  arg_softcap,
  arg_scale,
  arg_dropout_p,
  arg_deterministic,
  arg_layout,
  arg_alignment,
  arg_alibi_slopes,
  arg_bias,
  arg_mask
};

/// The options among the arguments; false where they are not plain.
bool read_options(PyObject* const* args, CallOptions& out);

/// Four axes, none of them empty, with the head dimension of q; a type and a head dimension for the kernels.
bool is_plain(const Tensor& tensor, const Tensor& q);

/// q, k and v, k and v alike but for the head dimension; false where they are not plain.
bool read_tensors(PyObject* const* qkv, Slots& out);

/// The same of one batch, where no mode of torch is to see the call.
bool read_plain(PyObject* const* qkv, Slots& out);

/// A bias or a mask over `keys` keys, None where there is none; false where it is not plain.
bool read_scores(PyObject* argument, Slot slot, std::int64_t keys, Slots& out);

/// Makes the results, out and lse or dq, dk and dv, and a workspace, where `like` is; then runs the call.
void run_call(Call& call, bool backward, PyObject* like, std::span<NewTensor> results);

struct Results {
  nb::object out, lse;
};

/// Forward of a plain call: out like q, and lse if it is wanted.
struct Wanted {
  bool lse = false;
  bool backward_follows = false;
  PyObject* into = Py_None;  ///< a tensor of the shape and type of q for out; None: a new one
};
Results run_plain(PyObject* const* qkv, Slots& slots, const CallOptions& options, const Wanted& wanted);

template <nb::object (*function)(PyObject* const*, Py_ssize_t)>
PyObject* or_error(PyObject*, PyObject* const* args, Py_ssize_t count) {
  try {
    return function(args, count).release().ptr();
  } catch (...) {
    set_python_error(std::current_exception());
    return nullptr;
  }
}

/// A module's function that takes its arguments as an array, and whose C++ exceptions become Python's.
template <nb::object (*function)(PyObject* const*, Py_ssize_t)>
void add_fast(nb::module_& module, const char* name) {
  static PyMethodDef method{name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(or_error<function>)),
                            METH_FASTCALL, nullptr};
  module.attr(name) = nb::steal(PyCFunction_NewEx(&method, nullptr, nullptr));
}

}  // namespace flash_attention::python
