#pragma once

// Emulated: kernels/ptx/math.cuh. Approximations are wrong by as much as the PTX ISA lets them be, up or down as the
// operand's bits say, so that no kernel relies on luck: ex2 and lg2 by 2^-22 (lg2 near 1 absolutely), rcp by a unit in the
// last place, tanh by 2^-11. Powers of two, of which GPUs give exact results, have them here, too.

namespace flash_attention::ptx {

inline float flush_subnormal(float x) { return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0.0f, x) : x; }

/// -1, 0 or 1, from the bits of an operand.
inline int direction_of(float operand) {
  return static_cast<int>(__builtin_bit_cast(unsigned, operand) * 0x9e3779b1u >> 16) % 3 - 1;
}
/// A normal number that is no power of two, so many units of the last place away.
inline float units_off(float exact, int units) {
  const unsigned bits = __builtin_bit_cast(unsigned, exact), exponent = bits >> 23 & 0xff;
  if ((bits & 0x7fffff) == 0 || exponent == 0 || exponent == 0xff) return exact;
  const float off = __builtin_bit_cast(float, bits + static_cast<unsigned>(units));
  return (__builtin_bit_cast(unsigned, off) >> 23 & 0xff) == exponent ? off : exact;
}

inline void count_special() { ++emulator::thread->arithmetic->special; }
inline void count_simple() { ++emulator::thread->arithmetic->simple; }

inline float exp2(float x) {
  count_special();
  return flush_subnormal(units_off(__builtin_exp2f(flush_subnormal(x)), 2 * direction_of(x)));
}
inline float log2(float x) {
  count_special();
  const float exact = __builtin_log2f(x);
  if (exact != 0 && exact > -1 && exact < 1) return exact + 0x1p-22f * static_cast<float>(direction_of(x));
  return units_off(exact, direction_of(x));
}
inline float reciprocal(float x) {
  count_special();
  return flush_subnormal(units_off(1.0f / flush_subnormal(x), direction_of(x)));
}
inline float fma(float x, float y, float z) {
  emulator::thread->arithmetic->fma_flops += 2;
  return __builtin_fmaf(x, y, z);
}
inline float multiply(float x, float y) {
  count_simple();
  return x * y;
}
inline float max(float x, float y) {
  count_simple();
  return __builtin_fmaxf(x, y);
}
inline float max_or_nan(float x, float y) {
  count_simple();
  return x != x || y != y ? __builtin_nanf("") : __builtin_fmaxf(x, y);
}
inline float min_or_nan(float x, float y) { return x != x || y != y ? __builtin_nanf("") : __builtin_fminf(x, y); }
inline float min(float x, float y) { return __builtin_fminf(x, y); }
inline float abs(float x) { return __builtin_fabsf(x); }
inline float sqrt(float x) { return __builtin_sqrtf(x); }
inline float sin(float x) { return __builtin_sinf(x); }
inline float cos(float x) { return __builtin_cosf(x); }
inline float floor(float x) { return __builtin_floorf(x); }

}  // namespace flash_attention::ptx
