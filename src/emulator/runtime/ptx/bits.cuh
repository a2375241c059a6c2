#pragma once

// Emulated: kernels/ptx/bits.cuh.

namespace flash_attention::ptx {

inline int count_ones(unsigned word) { return __builtin_popcount(word); }
inline int leading_zeros(unsigned word) { return word == 0 ? 32 : __builtin_clz(word); }
inline int trailing_zeros(unsigned word) { return word == 0 ? 32 : __builtin_ctz(word); }

}  // namespace flash_attention::ptx
