#pragma once

// Launches that begin before the one before them has ended (PTX ISA 9.7.13.13, griddepcontrol). Such a launch (begins_early
// of its Launch) does what depends on nothing, then waits.

namespace flash_attention::ptx {

/// griddepcontrol.wait: until the launch before has ended and what it wrote can be seen. Before the first access to the
/// workspace and the first store; every block executes it, so that the end of a launch is the end of all before it.
__device__ __forceinline__ void await_launch_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

/// griddepcontrol.launch_dependents: the next launch may begin, as far as there is room, when every block has come here.
/// Before sm_90 no launch begins early.
__device__ __forceinline__ void let_next_launch_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace flash_attention::ptx
