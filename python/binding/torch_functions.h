#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "call/call.h"

namespace flash_attention::python {

/// What torch is, given once by set_eager() and kept for the life of the process.
struct Torch {
  PyTypeObject* tensor = nullptr;
  PyObject* empty_like = nullptr;
  PyObject* empty_strided = nullptr;  // (sizes, strides, *, dtype, device), faster than by sizes alone
  PyObject *float32 = nullptr, *uint8 = nullptr;
  PyObject* grad_enabled = nullptr;     // () -> bool
  PyObject* deterministic = nullptr;    // () -> bool, whether all algorithms must be
  PyObject* named_options = nullptr;    // flash_attention.options.Options
  PyObject* differentiate = nullptr;    // (q, k, v, options) -> out, by way of differentiable_forward()
  std::vector<PyObject*> interceptors;  // each () -> something true where calls are not to run as they are
  PyObject *autocast = nullptr, *autocast_of_cuda = nullptr;  // () -> bool; the second is faster and tells of CUDA alone
  PyObject* forward_ad = nullptr;                             // the names of torch.autograd.forward_ad
  PyObject* profiler = nullptr;                               // those of torch.autograd.profiler
  PyObject *requires_grad = nullptr, *device = nullptr;       // names of attributes
  PyObject *to_save = nullptr, *options = nullptr, *current_level = nullptr, *is_profiler_enabled = nullptr;
};

extern Torch torch;

/// A new reference, or the Python error that there is instead.
inline nb::object checked(PyObject* result) {
  if (result == nullptr) throw nb::python_error();
  return nb::steal(result);
}

inline nb::object answer(PyObject* function) { return checked(PyObject_CallNoArgs(function)); }

/// What a function of Python gives for these arguments.
template <std::size_t count>
nb::object result_of(PyObject* function, PyObject* const (&args)[count]) {
  return checked(PyObject_Vectorcall(function, args, count, nullptr));
}

bool is_intercepted(Device device);                        ///< a mode is on in which calls are not to run as they are
bool wants_gradient(PyObject* const* tensors, int count);  ///< gradients are on, and one of them asks for its own
bool are_tensors(PyObject* const* objects, int count);     ///< of the very class, not of one that is made from it

// Tensors that torch makes: by its C functions where this torch has them, which take less time than Python's.

struct NewTensor {
  nb::object object;
  Tensor tensor;  ///< what it is made of
};

/// As torch.empty_like(object) makes it; `tensor` is what the object is made of.
NewTensor empty_like(PyObject* object, const Tensor& tensor);

/// float32 [batch, heads_q, seq_q] where `like` is.
NewTensor empty_lse(PyObject* like, const Problem& problem, Device device);

/// Memory for the time of a call, where `like` is; Python sees nothing of it where torch has C functions. Made and gone
/// under the GIL.
class Scratch {
 public:
  Scratch(PyObject* like, std::size_t bytes, Device device, void* stream);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  void* data() const { return data_; }

 private:
  struct Kept;
  static Kept* take_kept(std::size_t bytes, Device device, void* stream);

  void* handle_ = nullptr;
  Kept* kept_ = nullptr;
  nb::object object_;
  void* data_ = nullptr;
};

/// Adds set_eager(), which says what torch is.
void add_torch(nb::module_& module);

}  // namespace flash_attention::python
