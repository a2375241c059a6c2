#pragma once

#include "tensor.h"

// What is refused about a tensor, in words that begin with its argument.

namespace flash_attention::python {

[[noreturn]] inline void refuse(const Tensor& tensor, const std::string& allowed) {
  throw nb::value_error((std::string(tensor.name) + ": got " + tensor.describe() + "; " + allowed).c_str());
}

[[noreturn]] inline void refuse_dtype(const Tensor& tensor, const std::string& expected) {
  throw nb::type_error((std::string(tensor.name) + ": got " + tensor.describe() + "; expected " + expected).c_str());
}

inline std::string axes(std::initializer_list<std::int64_t> sizes) {
  std::string text = "[";
  for (std::int64_t size : sizes) {
    text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  }
  return text + "]";
}

inline void need_float32(const Tensor& tensor) {
  if (!tensor.is_dtype(nb::dlpack::dtype_code::Float, 32)) {
    refuse_dtype(tensor, "dtype float32");
  }
}

inline void need_unit_last_stride(const Tensor& tensor) {
  const int last = tensor.rank - 1;
  if (!tensor.empty() && tensor.sizes[last] > 1 && tensor.strides[last] != 1) {
    refuse(tensor, "the last axis has stride " + std::to_string(tensor.strides[last]) + "; it must be 1");
  }
}

}  // namespace flash_attention::python
