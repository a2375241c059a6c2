#pragma once

// The place of a producer or a consumer in a ring of stages.

namespace flash_attention::tile {

/// The n-th use of a ring of stages: which stage it is, and the parity of the phase that fills it.
template <int stages>
struct PipelineState {
  int stage;
  int phase;

  __device__ __forceinline__ explicit PipelineState(unsigned n) : stage(n % stages), phase(n / stages % 2) {}
  __device__ __forceinline__ void advance() {
    if (++stage < stages) return;
    stage = 0;
    phase ^= 1;
  }
};

}  // namespace flash_attention::tile
