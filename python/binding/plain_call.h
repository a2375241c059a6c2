#pragma once

#include <nanobind/nanobind.h>

#include <span>

#include "arguments.h"
#include "call/call.h"
#include "errors.h"
#include "torch_functions.h"

// Calls in the kernels' form (attention.cpp, eager_program.cpp): their arguments as Python gives them, and their run.

namespace flash_attention::python {

/// The options that most calls have; false if one is no plain number, flag or word.
bool read_options(const Given& given, CallOptions& out);

/// What a tensor is made of; false if it has no memory.
bool read_tensor(PyObject* object, const char* name, Tensor& out);

/// Four axes, none of them empty, with the head dimension of q; a type and a head dimension for the kernels.
bool is_plain(const Tensor& tensor, const Tensor& q);

/// q, k and v, k and v alike but for the head dimension; false if they are not plain.
bool read_tensors(PyObject* const* qkv, Slots& out);

/// A bias or a mask over `keys` keys, if there is one; false if it is not plain.
bool read_scores(PyObject* argument, Slot slot, std::int64_t keys, Slots& out);

/// int32, if there is one; false if it is anything else.
bool read_integers(PyObject* argument, Slot slot, Slots& out);

/// Nothing, or a tensor of the type and shape of q, as which the call writes it.
bool fits_out(PyObject* argument, const Tensor& q);

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
