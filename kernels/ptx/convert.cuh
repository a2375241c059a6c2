#pragma once

// The 16-bit types and their conversions, round to nearest even (PTX ISA 9.7.9.22, cvt). A pair of them in one register
// has the first element in the low half.

#include "abi/config.h"

namespace flash_attention::ptx {

struct bfloat16 {
  unsigned short bits;
};
struct half {
  unsigned short bits;
};

/// The C++ type of a tensor's elements.
template <abi::Type type>
struct ElementOf {
  using Type = float;
};
template <>
struct ElementOf<abi::Type::float16> {
  using Type = half;
};
template <>
struct ElementOf<abi::Type::bfloat16> {
  using Type = bfloat16;
};
template <abi::Type type>
using Element = typename ElementOf<type>::Type;

__device__ __forceinline__ float to_float(float value) { return value; }

/// A bfloat16 is the upper half of a float.
__device__ __forceinline__ float to_float(bfloat16 value) {
  return __builtin_bit_cast(float, static_cast<unsigned>(value.bits) << 16);
}

/// cvt.f32.f16.
__device__ __forceinline__ float to_float(half value) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
}

/// cvt.rn to type T, as in from_float<half>(x).
template <typename T>
__device__ __forceinline__ T from_float(float value) {
  return value;
}
template <>
__device__ __forceinline__ half from_float<half>(float value) {
  half result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
}
template <>
__device__ __forceinline__ bfloat16 from_float<bfloat16>(float value) {
  bfloat16 result;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
#else
  const unsigned bits = __builtin_bit_cast(unsigned, value);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  result.bits = nan ? 0x7fff : static_cast<unsigned short>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
  return result;
}

/// Two floats as a pair of 16-bit elements: cvt.rn.bf16x2.f32 or cvt.rn.f16x2.f32 (sm_80).
template <abi::Type type>
__device__ __forceinline__ unsigned pack(float low, float high) {
  static_assert(type != abi::Type::float32, "only 16-bit elements are packed");
#if __CUDA_ARCH__ >= 800
  unsigned result;
  if constexpr (type == abi::Type::bfloat16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  }
  return result;
#else
  return from_float<Element<type> >(low).bits | static_cast<unsigned>(from_float<Element<type> >(high).bits) << 16;
#endif
}

/// One half of a pair as a float.
template <abi::Type type>
__device__ __forceinline__ float unpack_low(unsigned pair) {
  return to_float(Element<type>{static_cast<unsigned short>(pair)});
}
template <abi::Type type>
__device__ __forceinline__ float unpack_high(unsigned pair) {
  return to_float(Element<type>{static_cast<unsigned short>(pair >> 16)});
}

/// cvt.rna.tf32.f32 (sm_80): a float rounded to the 10 mantissa bits that the tensor cores read.
__device__ __forceinline__ unsigned to_tf32(float value) {
  unsigned result;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(result) : "f"(value));
  return result;
}

}  // namespace flash_attention::ptx
