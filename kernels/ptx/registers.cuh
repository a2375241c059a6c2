#pragma once

// Registers: moving them between warpgroups (PTX ISA 9.7.19.5, setmaxnreg), and keeping the compiler from holding them.
//
// setmaxnreg: A multiple of 8 from 24 to 256; every warp of the
// warpgroup executes it; the kernel has __launch_bounds__ so that the count at entry is fixed.

namespace flash_attention::ptx {

/// setmaxnreg.inc: waits until the block's pool has enough.
template <int count>
__device__ __forceinline__ void registers_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

/// setmaxnreg.dec: gives registers back to the pool.
template <int count>
__device__ __forceinline__ void registers_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

/// No instruction: what depends on the result is computed after this point, not kept in registers from long before it.
__device__ __forceinline__ int registers_fresh(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

/// %nctaid.x, gridDim.x, read here: known from before it might be kept through all products.
__device__ __forceinline__ int registers_fresh_grid() {
  int blocks;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(blocks));
  return blocks;
}

}  // namespace flash_attention::ptx
