#pragma once

// Bits of a word (PTX ISA 9.7.1.12 popc, 9.7.1.13 clz, 9.7.1.16 brev).

namespace flash_attention::ptx {

/// popc.b32.
__device__ __forceinline__ int count_ones(unsigned word) {
  int count;
  asm("popc.b32 %0, %1;" : "=r"(count) : "r"(word));
  return count;
}

/// clz.b32: zeros above the highest one; 32 for 0.
__device__ __forceinline__ int leading_zeros(unsigned word) {
  int count;
  asm("clz.b32 %0, %1;" : "=r"(count) : "r"(word));
  return count;
}

/// brev.b32 and clz.b32: zeros below the lowest one; 32 for 0.
__device__ __forceinline__ int trailing_zeros(unsigned word) {
  unsigned reversed;
  asm("brev.b32 %0, %1;" : "=r"(reversed) : "r"(word));
  return leading_zeros(reversed);
}

}  // namespace flash_attention::ptx
