#pragma once

#include <nanobind/nanobind.h>

#include <span>

#include "arguments.h"
#include "call/call.h"
#include "errors.h"
#include "torch_functions.h"

// Calls in the kernels' form (attention.cpp, eager_program.cpp): reads their arguments from Python and runs them.

namespace flash_attention::python {

/// Reads the options that most calls have; false if one is not a plain number, flag or word.
bool read_options(const Given& given, CallOptions& out);

/// Reads a tensor; false if it has no memory.
bool read_tensor(PyObject* object, const char* name, Tensor& out);

/// Whether a tensor has four axes, none of them empty, the head dimension of q, and a type and head dimension that the
/// kernels support.
bool is_plain(const Tensor& tensor, const Tensor& q);

/// Reads q, k and v; k and v differ at most in the head dimension. False if they are not plain.
bool read_tensors(PyObject* const* qkv, Slots& out);

/// Reads a bias or a mask over `keys` keys, if there is one; false if it is not plain.
bool read_scores(PyObject* argument, Slot slot, std::int64_t keys, Slots& out);

/// Reads an int32 tensor, if there is one; false if it has another type.
bool read_integers(PyObject* argument, Slot slot, Slots& out);

/// Whether the argument is None, or a tensor of the type and shape of q to which the call can write out.
bool fits_out(PyObject* argument, const Tensor& q);

/// Makes the results (out and lse, or dq, dk and dv) and a workspace on the device of `like`, then runs the call.
void run_call(Call& call, bool backward, PyObject* like, std::span<NewTensor> results);

struct Results {
  nb::object out, lse;
};

/// Runs the forward pass of a plain call: out like q, and lse if it is wanted.
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

/// A function of the module that gets its arguments as an array; its C++ exceptions become Python's.
template <nb::object (*function)(PyObject* const*, Py_ssize_t)>
void add_fast(nb::module_& module, const char* name) {
  static PyMethodDef method{name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(or_error<function>)),
                            METH_FASTCALL, nullptr};
  module.attr(name) = nb::steal(PyCFunction_NewEx(&method, nullptr, nullptr));
}

}  // namespace flash_attention::python
