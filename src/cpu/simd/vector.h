#pragma once

// Vectors of float by the compiler's vector extensions. isa/<isa>.cpp sets the sizes, beginning with `vector_lanes`.
// simd/<isa>.h includes this file and adds the few operations that the extensions lack. Everything is in an unnamed
// namespace: each instruction set is one translation unit, and the linker must not merge its functions with another's.

#include <cstdint>

#if defined(__clang__)
#define FLASH_ATTENTION_UNROLL _Pragma("unroll")
#else
#define FLASH_ATTENTION_UNROLL _Pragma("GCC unroll 32")
#endif
#define FLASH_ATTENTION_INLINE __attribute__((always_inline)) inline

namespace flash_attention::cpu {
namespace {

using Vec = float __attribute__((vector_size(4 * vector_lanes)));
using Int = std::int32_t __attribute__((vector_size(4 * vector_lanes)));
using Uint = std::uint32_t __attribute__((vector_size(4 * vector_lanes)));
using Short = std::uint16_t __attribute__((vector_size(2 * vector_lanes)));
using Bytes = std::uint8_t __attribute__((vector_size(vector_lanes)));

// The same in memory: any alignment, any declared type. (Clang honours `aligned` only after the new name.)
using VecInMemory __attribute__((aligned(1), may_alias)) = Vec;
using IntInMemory __attribute__((aligned(1), may_alias)) = Int;
using ShortInMemory __attribute__((aligned(1), may_alias)) = Short;
using BytesInMemory __attribute__((aligned(1), may_alias)) = Bytes;

FLASH_ATTENTION_INLINE Vec load(const float* from) { return *reinterpret_cast<const VecInMemory*>(from); }
FLASH_ATTENTION_INLINE Int load(const std::int32_t* from) { return *reinterpret_cast<const IntInMemory*>(from); }
FLASH_ATTENTION_INLINE Short load(const std::uint16_t* from) { return *reinterpret_cast<const ShortInMemory*>(from); }
FLASH_ATTENTION_INLINE Bytes load(const std::uint8_t* from) { return *reinterpret_cast<const BytesInMemory*>(from); }
FLASH_ATTENTION_INLINE void store(std::uint16_t* to, Short value) { *reinterpret_cast<ShortInMemory*>(to) = value; }
FLASH_ATTENTION_INLINE void store(float* to, Vec value) { *reinterpret_cast<VecInMemory*>(to) = value; }

/// The compiler folds x - 0 to x. It does not fold 0 + x, which differs for x = -0.
FLASH_ATTENTION_INLINE Vec splat(float value) { return value - Vec{}; }
FLASH_ATTENTION_INLINE Vec select(Int where, Vec yes, Vec no) { return where ? yes : no; }
FLASH_ATTENTION_INLINE Vec absolute(Vec x) { return (Vec)((Uint)x & 0x7fffffffu); }

FLASH_ATTENTION_INLINE Vec bfloat16_to_float(Short bits) { return (Vec)(__builtin_convertvector(bits, Uint) << 16); }

/// Rounds to nearest even. NaN stays NaN.
FLASH_ATTENTION_INLINE Short float_to_bfloat16(Vec x) {
  const Uint bits = (Uint)select(x == x, x, (Vec)(Uint{} + 0x7fc00000u));
  return __builtin_convertvector((bits + (((bits >> 16) & 1u) + 0x7fffu)) >> 16, Short);
}

/// The first `count` < vector_lanes codes, then 0.
FLASH_ATTENTION_INLINE Bytes load_first(const std::uint8_t* from, int count) {
  alignas(vector_lanes) std::uint8_t part[vector_lanes];
  for (int i = 0; i < vector_lanes; ++i) part[i] = i < count ? from[i] : 0;
  return load(part);
}

constexpr float infinity = __builtin_inff();
constexpr float log2_e = 1.44269504088896340736f;
constexpr float ln_2 = 0.69314718055994530942f;

}  // namespace
}  // namespace flash_attention::cpu
