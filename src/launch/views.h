#pragma once

#include "abi/args.h"
#include "flash_attention/problem.h"

namespace flash_attention::launch {

/// A tensor in the form that kernels take.
inline abi::TensorView view(const void* data, const Strides& strides) {
  return {const_cast<void*>(data), strides.batch, strides.seq, strides.head};
}

/// The scales of an 8-bit cache.
inline abi::ScaleView scale_view(const float* data, const Strides& strides) {
  return {data, strides.batch, strides.seq, strides.head};
}

/// The scales and zeros of a 4-bit cache's groups.
inline abi::GroupView group_view(const void* scales, const void* zeros, const Strides& strides) {
  return {const_cast<void*>(scales), const_cast<void*>(zeros), strides.batch, strides.seq, strides.head};
}

}  // namespace flash_attention::launch
