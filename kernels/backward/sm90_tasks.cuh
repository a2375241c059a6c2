#pragma once

// How the blocks of a persistent kernel share its tasks: a block's first task is its own index, later ones come from a
// counter in the workspace (zeroed by backward_sm90_prepare), so that a block that was given less takes more.

#include "backward/sm90_shape.cuh"
#include "ptx/atomic.cuh"

namespace flash_attention::backward_sm90 {

/// The latest tasks of a block, on their way from the lane that takes them to everyone else.
struct TaskQueue {
  int task_idx[2];
  ptx::Mbarrier full[2], free[2];

  __device__ __forceinline__ void init(int readers) {
    for (int slot = 0; slot < 2; ++slot) {
      ptx::mbarrier_init(full[slot], 1);
      ptx::mbarrier_init(free[slot], readers);
    }
  }

  /// One lane of the block: use(task) for each of its tasks.
  template <typename Use>
  __device__ __forceinline__ void take(unsigned* counter, int num_tasks, Use use) {
    int task = blockIdx.x;
#pragma unroll 1
    for (unsigned n = 0;; ++n) {
      const Turn<2> turn(n);
      ptx::mbarrier_wait(free[turn.slot], turn.parity ^ 1);  // everyone has read what was in the slot
      task_idx[turn.slot] = task;
      ptx::mbarrier_arrive(full[turn.slot]);
      if (task >= num_tasks) return;
      use(task);
      task = static_cast<int>(gridDim.x + ptx::atomic_add(counter, 1));
    }
  }

  /// Everyone else, each thread for itself.
  template <typename Use>
  __device__ __forceinline__ void follow(int num_tasks, Use use) {
#pragma unroll 1
    for (unsigned n = 0;; ++n) {
      const Turn<2> turn(n);
      ptx::mbarrier_wait(full[turn.slot], turn.parity);  // the task is there
      const int task = task_idx[turn.slot];
      ptx::mbarrier_arrive(free[turn.slot]);
      if (task >= num_tasks) return;
      use(task);
    }
  }
};

}  // namespace flash_attention::backward_sm90
