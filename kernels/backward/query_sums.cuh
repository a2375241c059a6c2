#pragma once

#include "backward/sm80/shape.cuh"
#include "ptx/atomic.cuh"
#include "tile/workspace.cuh"

// The fp32 sums of dQ in the workspace, BackwardSm80Region::dQ, to which many blocks add. They are in the order in
// which the threads of a block hold them, four neighbours a thread, so that every access of a warp covers 512
// neighbouring bytes:
//
//   tile (head, queries / block_q):  [register / 4][thread][4]

namespace flash_attention {

template <BackwardConfig config>
struct QuerySums {
  using Shape = BackwardSm80Shape<config>;
  static constexpr int warps_m = Shape::warps_q, warps_n = config.num_warps / warps_m;
  static constexpr int pairs = tile::ceil_div(Shape::dim / 16, warps_n);  // of 16 columns, a warp
  static constexpr int blocks = 2 * pairs;
  static constexpr long long tile_floats = 2LL * blocks * 4 * Shape::threads;
  using Four = ptx::Vector<float, 4>;

  __device__ __forceinline__ static float* begin(const AttentionArgs& args) {
    return tile::workspace<float>(args, BackwardSm80Region::dQ);
  }

  /// The thread's first four sums of a tile. Each packed sequence begins a new tile, so there are up to `batch` more
  /// tiles than the rows need.
  __device__ __forceinline__ static float* of_thread(const AttentionArgs& args, const tile::Sequence& sequence,
                                                     int head_idx, int tile_idx) {
    long long tile;
    if constexpr (config.features.packed) {
      const long long tiles_of_head = args.total_q / config.block_q + args.batch;
      tile = head_idx * tiles_of_head + sequence.start_q / config.block_q + sequence.batch_idx + tile_idx;
    } else {
      const long long plane = static_cast<long long>(sequence.batch_idx) * args.heads_q + head_idx;
      tile = plane * tile::ceil_div(args.seq_q, config.block_q) + tile_idx;
    }
    return begin(args) + tile * tile_floats + threadIdx.x * 4;
  }

  __device__ __forceinline__ static void add(float* sums, const float (&dQ)[2][blocks][4]) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < blocks; ++n) {
        const Four values{{dQ[m][n][0], dQ[m][n][1], dQ[m][n][2], dQ[m][n][3]}};
        ptx::reduce_add(sums + (m * blocks + n) * Shape::threads * 4, values);
      }
    }
  }

  __device__ __forceinline__ static void read(const float* sums, float (&dQ)[2][blocks][4]) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < blocks; ++n) {
        const auto values = *reinterpret_cast<const Four*>(sums + (m * blocks + n) * Shape::threads * 4);
#pragma unroll
        for (int e = 0; e < 4; ++e) dQ[m][n][e] = values[e];
      }
    }
  }
};

/// Zeroes the sums; one block a tile.
template <BackwardConfig config>
__device__ __forceinline__ void backward_clear_sums(const AttentionArgs& args) {
  using Sums = QuerySums<config>;
  float* tile = Sums::begin(args) + blockIdx.x * Sums::tile_floats;
  for (int i = 4 * threadIdx.x; i < Sums::tile_floats; i += 4 * Sums::Shape::threads) {
    *reinterpret_cast<typename Sums::Four*>(tile + i) = {};
  }
}

}  // namespace flash_attention
