#pragma once

#include "errors.h"
#include "tensor.h"

// Refusals of a tensor. Braces mark the names of other arguments.

namespace flash_attention::python {

[[noreturn]] inline void refuse(const Tensor& tensor, const std::string& allowed) {
  refuse_value(tensor.name, "got " + tensor.describe() + "; " + allowed);
}

[[noreturn]] inline void refuse_dtype(const Tensor& tensor, const std::string& expected) {
  using Code = nb::dlpack::dtype_code;
  const char* remedy = "";
  if (expected == "dtype int32" && tensor.is_dtype(Code::Int, 64)) {
    remedy = " (torch: .int(); NumPy: .astype('int32'))";
  } else if (expected == "dtype bool" && known_dtype(tensor)) {
    remedy = "; numbers that are added to scores are a bias";
  } else if (expected == "dtype bool") {
    remedy = " (torch: .bool(); NumPy: .astype(bool))";
  }
  refuse_type(tensor.name, "got " + tensor.describe() + "; expected " + expected + remedy);
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
    refuse(tensor, "the last axis has stride " + std::to_string(tensor.strides[last]) +
                       "; it must be 1 (torch: .contiguous(); NumPy: numpy.ascontiguousarray)");
  }
}

/// The element type of a cache. Bytes, signed or not, are codes of the type that the caller names.
inline Dtype cache_dtype_of(const Tensor& cache, const std::string& codes) {
  using Code = nb::dlpack::dtype_code;
  if (const std::optional<Dtype> wide = known_dtype(cache)) return *wide;
  if (!cache.is_dtype(Code::UInt, 8) && !cache.is_dtype(Code::Int, 8)) {
    refuse_dtype(cache, "float32, float16, bfloat16, float8_e4m3fn, float8_e5m2 or int8");
  }
  for (const Dtype dtype : {Dtype::float8_e4m3, Dtype::float8_e5m2, Dtype::int8, Dtype::nvfp4, Dtype::mxfp4, Dtype::int4}) {
    if (codes == to_string(dtype)) return dtype;
  }
  refuse_value("cache_dtype", "got '" + codes + "'; allowed are float8_e4m3, float8_e5m2, int8, nvfp4, mxfp4 and int4");
}

/// Columns of a row that has so many elements.
inline std::int64_t columns_of(Dtype dtype, std::int64_t elements) { return has_groups(dtype) ? 2 * elements : elements; }

/// The numbers of groups: scales of nvfp4 and mxfp4 are bytes; those of int4, and its zeros, have the type of q or k.
inline void need_group_dtype(const Tensor& tensor, Dtype codes, Dtype wide) {
  if (codes == Dtype::int4) {
    if (known_dtype(tensor) != wide) refuse_dtype(tensor, "dtype " + std::string(to_string(wide)));
  } else if (tensor.dtype.bits != 8) {
    refuse_dtype(tensor, "dtype uint8");
  }
}

}  // namespace flash_attention::python
