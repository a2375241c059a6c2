#pragma once

// The clock of an SM (PTX ISA 10.24, %clock64).

namespace flash_attention::ptx {

/// The number of cycles so far. Other instructions are not moved across it.
__device__ __forceinline__ unsigned long long clock() {
  unsigned long long cycles;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(cycles)::"memory");
  return cycles;
}

}  // namespace flash_attention::ptx
