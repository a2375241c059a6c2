#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "call/call.h"

namespace flash_attention::python {

/// torch's functions and classes, set once by set_eager() and kept for the life of the process.
struct Torch {
  PyTypeObject* tensor = nullptr;
  PyObject* empty_like = nullptr;
  PyObject* empty_strided = nullptr;  // (sizes, strides, *, dtype, device), faster than by sizes alone
  PyObject *float32 = nullptr, *uint8 = nullptr;
  PyObject* grad_enabled = nullptr;                           // () -> bool
  PyObject* deterministic = nullptr;                          // () -> bool, whether all algorithms must be
  PyObject* matmul_precision = nullptr;                       // () -> str, how float32 is multiplied
  PyObject* named_options = nullptr;                          // flash_attention.options.Options
  PyObject* differentiate = nullptr;                          // (q, k, v, options) -> out, through differentiable_forward()
  PyObject* general_backward = nullptr;                       // (q, k, v, out, lse, dout, options) -> (dq, dk, dv)
  PyObject* dispatch_modes = nullptr;                         // () -> int, how many of them are on
  std::vector<PyObject*> interceptors;                        // each () -> true if calls must not run directly
  PyObject *autocast = nullptr, *autocast_of_cuda = nullptr;  // () -> bool; the second is faster, and only about CUDA
  PyObject* forward_ad = nullptr;                             // the names of torch.autograd.forward_ad
  PyObject* profiler = nullptr;                               // those of torch.autograd.profiler
  PyObject* autocast_type = nullptr;                          // (kind of device) -> torch.dtype
  PyObject *cpu = nullptr, *cuda = nullptr;                   // kinds of devices
  PyObject *requires_grad = nullptr, *device = nullptr, *dtype = nullptr;  // names of attributes
  PyObject *to_save = nullptr, *options = nullptr, *current_level = nullptr, *is_profiler_enabled = nullptr;
};

extern Torch torch;

/// A new reference, or throws the pending Python error.
inline nb::object checked(PyObject* result) {
  if (result == nullptr) throw nb::python_error();
  return nb::steal(result);
}

inline nb::object answer(PyObject* function) { return checked(PyObject_CallNoArgs(function)); }

/// Calls a Python function with these arguments.
template <std::size_t count>
nb::object result_of(PyObject* function, PyObject* const (&args)[count]) {
  return checked(PyObject_Vectorcall(function, args, count, nullptr));
}

/// Stores in q, a tensor made of `object`, the current stream of its library, and how the library multiplies float32.
void read_current(nb::handle object, Tensor& q);

/// Whether a mode is on in which calls must not run directly, or autocast has another type for q, k or v.
bool is_intercepted(PyObject* const* qkv, Device device);
bool wants_gradient(PyObject* const* tensors, int count);  ///< gradients are on, and one of them needs its own
bool are_tensors(PyObject* const* objects, int count);     ///< of exactly this class, not of a derived one

// Tensors that torch makes: by its C functions if this torch has them, which take less time than Python's and need no GIL.
// A call releases the GIL only once, for the memory of its results and its launch: each time, a waiting thread, such as
// torch's thread for gradients, may take it and keep the call waiting.

/// A tensor for a result: first described, then made, then passed to Python.
class NewTensor {
 public:
  NewTensor() = default;  ///< none

  /// As torch.empty_like(object) makes it; `tensor` describes the object.
  static NewTensor like(PyObject* object, const Tensor& tensor);

  /// float32 [batch, heads_q, seq_q] on the device of `like`.
  static NewTensor lse_of(PyObject* like, const Problem& problem, Device device);

  /// A tensor that the caller has made; `tensor` describes it.
  static NewTensor given(PyObject* object, const Tensor& tensor);

  NewTensor(NewTensor&&) = delete;
  ~NewTensor();

  bool make();             ///< makes its memory, with or without the GIL; false if torch's C functions cannot
  void make_by_python();   ///< the same with the GIL, or torch's error; does nothing if there is memory already
  nb::object to_python();  ///< with the GIL; None if there is no tensor

  Tensor tensor;  ///< without data until it is made

 private:
  NewTensor(PyObject* like, bool is_lse, const Tensor& shape);
  NewTensor(nb::object object, const Tensor& made) : tensor(made), like_(object.ptr()), object_(std::move(object)) {}

  PyObject* like_ = nullptr;
  bool is_lse_ = false;
  void* handle_ = nullptr;
  nb::object object_;
};

/// Memory for the time of a call; Python does not see it if torch has C functions. Constructed and destroyed with the GIL.
class Scratch {
 public:
  Scratch(std::size_t bytes, Device device, void* stream);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  bool make();                          ///< as NewTensor's
  void make_by_python(PyObject* like);  ///< on the device of `like`
  void* data() const { return data_; }

 private:
  struct Kept;
  static Kept* take_kept(std::size_t bytes, Device device, void* stream);

  std::size_t bytes_;
  Device device_;
  void* handle_ = nullptr;
  Kept* kept_ = nullptr;
  nb::object object_;
  void* data_ = nullptr;
};

/// Adds set_eager(), which sets torch's functions.
void add_torch(nb::module_& module);

}  // namespace flash_attention::python
