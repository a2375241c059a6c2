#pragma once

// Registers of several small elements: bytes, and pairs of 16-bit numbers (PTX ISA 9.7.9.7 prmt, 9.7.4 half
// precision, 9.7.9.22 cvt).

#include "abi/config.h"

namespace flash_attention::ptx {

/// prmt: byte i of the result is byte (selector >> 4 i) & 7 of the eight bytes of `low` and `high`.
__device__ __forceinline__ unsigned permute_bytes(unsigned low, unsigned high, unsigned selector) {
  unsigned result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(selector));
  return result;
}

/// mov.b32: the upper half of a register. cvt takes it as an operand; a shift would be one more instruction.
__device__ __forceinline__ unsigned short upper_half(unsigned pair) {
  unsigned short result;
  asm("{\n.reg .b16 low;\nmov.b32 {low, %0}, %1;\n}" : "=h"(result) : "r"(pair));
  return result;
}

/// cvt.rn.f16x2.e4m3x2 (sm_89): exact, NaN stays NaN. The first of a pair is in the low bits.
__device__ __forceinline__ unsigned e4m3_to_half_pair(unsigned short pair) {
  unsigned result;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(result) : "h"(pair));
  return result;
}

/// cvt.rn.satfinite.e4m3x2.f32 (sm_89): to nearest even, clipped to 448; the first in the low bits.
__device__ __forceinline__ unsigned short to_e4m3_pair(float low, float high) {
  unsigned short result;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(result) : "f"(high), "f"(low));
  return result;
}

/// x * y: mul.f16x2, or fma.rn.bf16x2 with -0 (sm_80).
template <abi::Type type>
__device__ __forceinline__ unsigned multiply_pairs(unsigned x, unsigned y) {
  unsigned result;
  if constexpr (type == abi::Type::bfloat16) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(y), "r"(0x80008000u));
  } else {
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(x), "r"(y));
  }
  return result;
}

/// x * y + z, rounded once.
template <abi::Type type>
__device__ __forceinline__ unsigned fma_pairs(unsigned x, unsigned y, unsigned z) {
  unsigned result;
  if constexpr (type == abi::Type::bfloat16) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(y), "r"(z));
  } else {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(y), "r"(z));
  }
  return result;
}

/// mul.f16x2.
__device__ __forceinline__ unsigned multiply_half_pairs(unsigned x, unsigned y) {
  unsigned result;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(x), "r"(y));
  return result;
}

/// x - y: sub.f16x2, or fma.rn.bf16x2 with a factor of -1 (sm_80).
template <abi::Type type>
__device__ __forceinline__ unsigned subtract_pairs(unsigned x, unsigned y) {
  unsigned result;
  if constexpr (type == abi::Type::bfloat16) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(y), "r"(0xbf80bf80u), "r"(x));
  } else {
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(x), "r"(y));
  }
  return result;
}

}  // namespace flash_attention::ptx
