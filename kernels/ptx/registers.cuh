#pragma once

// Registers: moving them between warpgroups (PTX ISA 9.7.19.5, setmaxnreg), and keeping the compiler from holding values.
//
// setmaxnreg takes a multiple of 8 from 24 to 256. Every warp of the warpgroup executes it. The kernel needs
// __launch_bounds__, which fix the count at entry.

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

/// Returns `value`; the compiler does not know that they are equal. So it computes what depends on the result after this
/// point, and does not keep it in registers from long before. No instruction is executed.
__device__ __forceinline__ int hide_from_compiler(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

/// gridDim.x, read at this point. Otherwise the compiler might keep a value that it read earlier in a register.
__device__ __forceinline__ int fresh_grid_size() {
  int blocks;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(blocks));
  return blocks;
}

}  // namespace flash_attention::ptx
