#pragma once

// Biases through shared memory. With every KV block, the producer loads a tile of biases of 64 queries for each warpgroup
// with TMA. The warps read them 16 x 16 at a time with ldmatrix, in the layout of the scores. Direct loads by each thread
// would use half a sector of each of eight rows.

#include "forward/sm90/softmax.cuh"
#include "ptx/tma.cuh"

namespace flash_attention::forward_sm90 {

/// TMA needs addresses that are multiples of 16. If they are not, the warps copy the tiles themselves.
__device__ __forceinline__ bool has_bias_boxes(const AttentionArgs& args) {
  return reinterpret_cast<unsigned long long>(args.bias.data) % 16 == 0;
}

/// Called by one thread, before init_barriers.
template <typename Storage>
__device__ __forceinline__ void init_bias_barriers(Storage& shared) {
  if constexpr (Storage::S::bias_stages > 0) {
    for (int s = 0; s < Storage::S::bias_stages; ++s) {
      for (int w = 0; w < Storage::S::warpgroups; ++w) {
        ptx::mbarrier_init(shared.bias_full[s][w], 1);
        ptx::mbarrier_init(shared.bias_empty[s][w], wg_threads / 32);
      }
    }
  }
}

/// The producer's loads.
template <ForwardConfig config, typename Storage = SharedStorage<config>>
struct BiasBoxes {
  using S = Shape<config>;

  const AttentionArgs& args;
  Storage& shared;
  PipelineState<(S::bias_stages > 0 ? S::bias_stages : 1)> next{0};

  __device__ __forceinline__ void load(const Tile& tile, int block) {
    if constexpr (S::bias_stages > 0) {
      if (!has_bias_boxes(args)) return;
      const int head_idx = args.bias.head_stride != 0 ? tile.head_idx : 0;
      const int batch_idx = args.bias.batch_stride != 0 ? tile.sequence.batch_idx : 0;
#pragma unroll 1
      for (int w = 0; w < S::warpgroups; ++w) {
        ptx::mbarrier_wait(shared.bias_empty[next.stage][w], next.phase ^ 1);  // all its warps have read the previous tile
        ptx::mbarrier_arrive_expect_tx(shared.bias_full[next.stage][w], S::bias_bytes);
#pragma unroll
        for (int c = 0; c < S::block_kv / S::bias_keys; ++c) {
          ptx::tma_load_4d(shared.biases[next.stage][w][c], args.maps[map_bias], shared.bias_full[next.stage][w],
                           block * S::block_kv + c * S::bias_keys, tile.q_begin + w * wg_rows, head_idx, batch_idx);
        }
      }
      next.advance();
    }
  }
};

/// The place of 16 bytes of a row of a chunk. It is swizzled by the row; if a row has 64 bytes, by pairs of rows.
template <ForwardConfig config>
__device__ __forceinline__ unsigned bias_piece(int row, int piece) {
  constexpr int pieces = Shape<config>::bias_keys / 8;
  return row * pieces * 16 + (piece ^ (pieces == 8 ? row % 8 : row / 2 % 4)) * 16;
}

/// Without TMA: a warp copies its own 16 rows.
template <ForwardConfig config>
__device__ __forceinline__ void copy_biases(const ScoreMath<config>& math, unsigned smem, int warp, int lane,
                                            int kv_begin) {
  using S = Shape<config>;
  const int first_query = math.row - lane / 4;
#pragma unroll 1
  for (int i = lane; i < 16 * S::block_kv; i += 32) {
    const int row = i / S::block_kv, key = i % S::block_kv, chunk = key / S::bias_keys, inside = key % S::bias_keys;
    unsigned short bits = 0;
    if (first_query + row < math.score.sight.len_q && kv_begin + key < math.score.sight.visible_kv) {
      bits = __builtin_bit_cast(unsigned short,
                                math.score.bias[(first_query + row) * math.score.bias_stride + kv_begin + key]);
    }
    ptx::store_shared(
        smem + chunk * wg_rows * S::bias_keys * 2 + bias_piece<config>(warp * 16 + row, inside / 8) + inside % 8 * 2, bits);
  }
  __syncwarp();  // all have been written before one is read
}

/// Waits for the biases of a warpgroup's n-th block and sets their address in `math`. all: also loads them to registers.
template <ForwardConfig config, typename Warpgroup>
__device__ __forceinline__ void take_biases(const Warpgroup& wg, const ScoreMath<config>& math, unsigned n, int kv_begin,
                                            bool all) {
  using S = Shape<config>;
  if constexpr (S::bias_stages > 0) {
    const PipelineState<S::bias_stages> at(n);
    const int thread = ptx::hide_from_compiler(wg.thread), warp = thread / 32, lane = thread % 32;
    const unsigned smem = ptx::shared_address(wg.shared.biases[at.stage][wg.warpgroup]);
    if (has_bias_boxes(wg.args)) {
      ptx::mbarrier_wait(wg.shared.bias_full[at.stage][wg.warpgroup], at.phase);
    } else {
      copy_biases(math, smem, warp, lane, kv_begin);
    }
    // ldmatrix of 16 x 16 biases: rows 0 to 7 and 8 to 15 of the first eight keys, then of the other eight.
    math.bias_smem = smem + bias_piece<config>(warp * 16 + lane % 16, lane / 16);
    if (all) math.read_biases();
  }
}
/// Releases the biases: they have been read.
template <typename Warpgroup>
__device__ __forceinline__ void release_biases(const Warpgroup& wg, unsigned n) {
  using S = typename Warpgroup::S;
  if constexpr (S::bias_stages > 0) {
    const PipelineState<S::bias_stages> at(n);
    __syncwarp();
    if (has_bias_boxes(wg.args) && wg.thread % 32 == 0) ptx::mbarrier_arrive(wg.shared.bias_empty[at.stage][wg.warpgroup]);
  }
}

}  // namespace flash_attention::forward_sm90
