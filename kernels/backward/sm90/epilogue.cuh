#pragma once

// The end of a work tile of backward/sm90: dK and dV leave the registers, for their rows or for fp32 sums in memory.

#include "backward/sm90/dq_exchange.cuh"
#include "backward/sm90/ordered_accumulate.cuh"
#include "backward/sm90/prepare.cuh"
#include "ptx/path.cuh"
#include "ptx/tma.cuh"

namespace flash_attention::backward_sm90 {

template <BackwardConfig config>
struct Epilogue : DqExchange<config> {
  using Base = DqExchange<config>;
  using Base::args, Base::shared, Base::warpgroup, Base::thread, Base::end_step, Base::task, Base::type;
  using typename Base::S;

  /// What this warp sent before has left the staging buffer.
  __device__ __forceinline__ void await_copies() const {
    if (thread % 32 == 0) ptx::bulk_wait_read<0>();
    __syncwarp();
  }
  /// A tile of dK or dV, times a factor, to the staging buffer (SumOrder::by_register). With ordinary stores here the
  /// compiler spills in the main loop at head dimension 128.
  template <int width>
  __device__ __forceinline__ void stage_keys(const float (&tile)[width / 2], float factor) const {
    static_assert(width <= S::width);
    const int lane = thread % 32, warp = thread / 32;
    float* staging = shared.dQ[warpgroup][warp];
    await_copies();
#pragma unroll
    for (int group = 0; group < width / 8; ++group) {
      const auto word = [&](int i) { return __builtin_bit_cast(unsigned, tile[4 * group + i] * factor); };
      ptx::stmatrix_x4(staging + (group * 32 + lane) * 4, word(0), word(1), word(2), word(3));
    }
  }
  /// Adds what each warp has staged to the sums in memory.
  template <int width>
  __device__ __forceinline__ void send(float* sums) const {
    const int lane = thread % 32, warp = thread / 32;
    ptx::fence_async_shared();  // the numbers before the copy that reads them
    __syncwarp();
    if (lane == 0) {
      ptx::bulk_reduce_add(sums + 16 * warp * width, shared.dQ[warpgroup][warp], 16 * width * 4);
      ptx::bulk_commit();
    }
  }

  /// Other tasks have dK and dV of the same keys too. The factor of dV is 1, which the compiler does not know: it must not
  /// store the accumulators themselves, which would have to lie where the store wants them.
  __device__ __forceinline__ void add_keys_to_sums(const float (&dK)[S::width / 2],
                                                   const float (&dV)[S::width_v / 2]) const {
    const long long row =
        padded_key<config>(args, task().sequence, task().kv_head_idx) + task().kv_begin + warpgroup * tile_rows;
    const float one = __builtin_bit_cast(float, ptx::registers_fresh(__builtin_bit_cast(int, 1.f)));
    unsigned* const order = dkv_order_of(args, row + warp_keys * (thread / 32));
    const bool in_order = S::ordered && thread % 32 == 0;
    if (in_order) {
      if (task().gqa_split != 0) ptx::path<"backward/sm90 dK added in order">();
      wait_for_order(order, task().gqa_split);
    }
    stage_keys<S::width>(dK, args.scale);
    send<S::width>(workspace<float>(args, Region::dK) + row * S::width);
    stage_keys<S::width_v>(dV, one);
    send<S::width_v>(workspace<float>(args, Region::dV) + row * S::width_v);
    if (in_order) signal_next(order, task().gqa_split + 1);
    if (thread % 32 == 0) ptx::bulk_wait_read<0>();  // this may have been the last task
  }

  /// All products of the task are done: dK and dV to memory.
  __device__ __forceinline__ void finish_task(const float (&dK)[S::width / 2], const float (&dV)[S::width_v / 2]) const {
    if constexpr (!S::separate_dq) this->await_sender(end_step);
    if constexpr (config.key_sums) return add_keys_to_sums(dK, dV);
    const int lane = thread % 32;
    const auto rows_of = [&](const TensorView& view) {
      const int kv_begin = task().kv_begin + warpgroup * tile_rows;
      return tile::key_rows<typename S::Element, config.features>(view, task().sequence, task().kv_head_idx).from(kv_begin);
    };
    if constexpr (!S::separate_dq && S::width_v <= S::width) {
      const int warp = thread / 32;
      char* staging = reinterpret_cast<char*>(shared.dQ[warpgroup][warp]);
      write_staged_rows<type, config.head_dim, S::width>(rows_of(args.dK).from(16 * warp), dK, args.scale, staging, lane);
      write_staged_rows<type, config.head_dim_v, S::width_v>(rows_of(args.dV).from(16 * warp), dV, 1,
                                                             staging + 16 * S::width * 2, lane);
    } else {
      write_rows<type, config.head_dim>(rows_of(args.dK), dK, args.scale, thread);
      write_rows<type, config.head_dim_v>(rows_of(args.dV), dV, 1, thread);
    }
  }
};

}  // namespace flash_attention::backward_sm90
