#pragma once

// Programmatic dependent launch (PTX ISA 9.7.13.13, griddepcontrol): a launch may begin before the previous one has ended
// (Launch::programmatic_launch). It does what does not depend on the previous launch, then waits for it.

namespace flash_attention::ptx {

/// Waits until the previous launch has ended and its stores are visible. A kernel waits before its first access to the
/// workspace and its first store. Every block waits, so that the end of a launch implies the end of all before it.
__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

/// When every block has executed this, blocks of the next launch may begin as soon as there is room for them.
/// Nothing before sm_90, where no launch begins early.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace flash_attention::ptx
