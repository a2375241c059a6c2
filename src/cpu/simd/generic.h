#pragma once

// Four lanes for no particular instruction set: any compiler with vector extensions can compile them.

#include "cpu/simd/portable.h"

namespace flash_attention::cpu {
namespace {

/// The larger; y if either is NaN.
FLASH_ATTENTION_INLINE Vec max(Vec x, Vec y) { return x > y ? x : y; }
FLASH_ATTENTION_INLINE Vec min(Vec x, Vec y) { return x < y ? x : y; }

/// a * b + sum. It is rounded twice if the baseline has no instruction that rounds once.
FLASH_ATTENTION_INLINE Vec fma(Vec a, Vec b, Vec sum) { return sum + a * b; }

/// Four floats, in every four lanes of the vector.
FLASH_ATTENTION_INLINE Vec load_quad(const float* from) { return load(from); }

FLASH_ATTENTION_INLINE Vec bounded_for_exp2(Vec x) { return min(splat(128.0f), max(splat(-127.0f), x)); }

FLASH_ATTENTION_INLINE Vec float16_to_float(Short half) {
  const Uint bits = __builtin_convertvector(half, Uint);
  const Uint sign = (bits & 0x8000u) << 16;
  const Uint magnitude = (bits & 0x7fffu) << 13;
  const Vec finite = (Vec)magnitude * 0x1p112f;  // moves the exponent's bias; correct for subnormals, too
  const Uint special = magnitude | 0x7f800000u;  // Inf and NaN
  return (Vec)((Uint)select(magnitude >= (0x7c00u << 13), (Vec)special, finite) | sign);
}

/// Rounds to nearest even.
FLASH_ATTENTION_INLINE Short float_to_float16(Vec x) {
  const Uint sign = ((Uint)x >> 16) & 0x8000u;
  const Uint bits = (Uint)x & 0x7fffffffu;
  const Uint normal = (bits - (112u << 23) + 0xfffu + ((bits >> 13) & 1u)) >> 13;
  const Uint subnormal = (Uint)((Vec)bits + 0.5f) - 0x3f000000u;  // 0.5 has the unit 2^-24 of a half's subnormals
  Uint half = (Uint)select(bits < (113u << 23), (Vec)subnormal, (Vec)normal);
  half = (Uint)select(bits >= 0x477ff000u, (Vec)(Uint{} + 0x7c00u), (Vec)half);  // rounds past the largest half
  half = (Uint)select(bits > 0x7f800000u, (Vec)(Uint{} + 0x7e00u), (Vec)half);
  return __builtin_convertvector(half | sign, Short);
}

}  // namespace
}  // namespace flash_attention::cpu
