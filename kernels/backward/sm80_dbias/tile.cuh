#pragma once

#include "backward/sm80_dbias/steps.cuh"
#include "ptx/convert.cuh"
#include "ptx/path.cuh"
#include "ptx/registers.cuh"
#include "ptx/warp.cuh"

// A tile of dbias in the registers of a block, and how it is written to global memory.

namespace flash_attention {

/// The part of a block's tile that a thread has in registers.
template <BackwardConfig config>
struct BackwardSm80BiasTile {
  using Steps = BackwardSm80BiasSteps<config>;
  static constexpr int warps_q = Steps::warps_q, warps_n = config.num_warps / warps_q;
  static constexpr int columns = config.block_kv / warps_n;
  using Element = ptx::Element<config.features.bias_dtype>;
  using Fragment = float[2][columns / 8][4];

  /// The place of the warp's part of the tile, and of the lane's first element. It is computed at each use, not kept.
  struct Place {
    const int thread = ptx::hide_from_compiler(threadIdx.x);
    const int lane = thread % 32;
    const int row = thread / 32 / warps_n * 32, column = thread / 32 % warps_n * columns;
    const int lane_row = row + lane / 4, lane_column = column + lane % 4 * 2;
  };

  __device__ __forceinline__ static void clear(Fragment& C) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < columns / 8; ++n) C[m][n][0] = C[m][n][1] = C[m][n][2] = C[m][n][3] = 0;
    }
  }
};

/// Sums the rows of the tile, two columns a thread. Returns false for threads that have no columns.
template <BackwardConfig config>
__device__ __forceinline__ bool sum_rows(const BackwardSm80BiasSteps<config>& steps,
                                         const typename BackwardSm80BiasTile<config>::Fragment& total, float (&sums)[2]) {
  using Tile = BackwardSm80BiasTile<config>;
  const typename Tile::Place place;
  __syncthreads();  // every thread has read the sums of the tile before
#pragma unroll
  for (int n = 0; n < Tile::columns / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float sum = total[0][n][e] + total[0][n][e + 2] + total[1][n][e] + total[1][n][e + 2];
#pragma unroll
      for (int lane_mask = 4; lane_mask < 32; lane_mask *= 2) sum += ptx::shuffle_xor(sum, lane_mask);
      if (place.lane < 4) steps.storage.sums[place.row / 32][place.lane_column + 8 * n + e] = sum;
    }
  }
  __syncthreads();  // the sums of every warp are written
  const int first = 2 * threadIdx.x;
  if (first >= config.block_kv) return false;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    sums[e] = 0;
    for (int part = 0; part < Tile::warps_q; ++part) sums[e] += steps.storage.sums[part][first + e];
  }
  return true;
}

/// Writes those of two neighbours that exist.
template <typename Bias>
__device__ __forceinline__ void store_two(Bias* to, int key, int seq_kv, bool by_two, float first, float second) {
  using Pair = ptx::Vector<Bias, 2>;
  const Pair pair{{ptx::from_float<Bias>(first), ptx::from_float<Bias>(second)}};
  if (by_two && key < seq_kv) return ptx::store_global(reinterpret_cast<Pair*>(to), pair);
  if (key < seq_kv) to[0] = pair[0];
  if (key + 1 < seq_kv) to[1] = pair[1];
}

/// Writes a tile of dbias.
template <BackwardConfig config>
__device__ __forceinline__ void store_dbias(const BackwardSm80BiasSteps<config>& steps,
                                            const typename BackwardSm80BiasTile<config>::Fragment& total, int tile_idx) {
  using Tile = BackwardSm80BiasTile<config>;
  using Bias = typename Tile::Element;
  constexpr int block_q = config.block_q, block_kv = config.block_kv;
  const AttentionArgs& args = steps.args;
  const auto at = steps.first_of(tile_idx);
  const int kv_begin = at.kv_tile * block_kv, q_begin = at.q_tile * block_q;
  Bias* dbias = static_cast<Bias*>(args.dbias) + at.batch_idx * args.dbias_batch_stride +
                at.head_idx * args.dbias_head_stride + q_begin * args.dbias_q_stride + kv_begin;
  const bool by_two = args.seq_kv % 2 == 0 && reinterpret_cast<unsigned long long>(args.dbias) % (2 * sizeof(Bias)) == 0;
  if (steps.all_queries()) {
    ptx::path<"backward/sm80 dbias summed over queries">();
    float sums[2];
    const int first = 2 * threadIdx.x;
    if (sum_rows(steps, total, sums)) store_two(dbias + first, kv_begin + first, args.seq_kv, by_two, sums[0], sums[1]);
    return;
  }
  const typename Tile::Place place;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = place.lane_row + 16 * m + 8 * half;
      if (q_begin + r >= args.seq_q) continue;
#pragma unroll
      for (int n = 0; n < Tile::columns / 8; ++n) {
        const int c = place.lane_column + 8 * n;
        store_two(dbias + r * args.dbias_q_stride + c, kv_begin + c, args.seq_kv, by_two, total[m][n][2 * half],
                  total[m][n][2 * half + 1]);
      }
    }
  }
}

}  // namespace flash_attention
