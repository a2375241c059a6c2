#pragma once

// Moving registers between warpgroups (PTX ISA 9.7.19.5, setmaxnreg). A multiple of 8 from 24 to 256; every warp of the
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

}  // namespace flash_attention::ptx
