#pragma once

// The loop of Attempt::nonfinite_safe. A probability of 0 times NaN is NaN. So if V holds NaN or Inf at a key that some row
// does not see, a product spoils that row. This loop removes NaN and Inf from V before each product and adds them to the
// rows that see them. Blocks are processed one after another without overlap, because this loop hardly ever runs.

#include "forward/sm90/bias_tiles.cuh"
#include "forward/sm90/ordered_loop.cuh"
#include "forward/sm90/warpgroup.cuh"

namespace flash_attention::forward_sm90 {

template <Type type>
__device__ __forceinline__ bool has_nonfinite(unsigned pair) {
  constexpr unsigned exponent = type == Type::float16 ? 0x7c00u : 0x7f80u;
  return (pair & exponent) == exponent || (pair >> 16 & exponent) == exponent;
}

/// Adds the NaN and Inf in `keys` rows of V to the outputs of the rows that see them ...
template <int keys, ForwardConfig config>
__device__ __forceinline__ void add_nonfinite(const Warpgroup<config>& wg, typename Warpgroup<config>::OutputTile& O,
                                              unsigned V_smem, int kv_begin, const Tile& tile,
                                              const ScoreMath<config>& math) {
  using S = Shape<config>;
  // The test whether a row sees a key may be long code. It is here once, not for each column, to save compile time.
  constexpr bool is_long =
      config.features.score_program || config.features.mask_program || config.features.precomputed_mask_bits;
  const auto pair_of = [&](int key, int group) {
    const unsigned piece = V_smem + group / 8 * keys * 128 + key * 128 + (group % 8 ^ key % 8) * 16;
    return ptx::load_shared<unsigned>(piece + 2 * math.column);
  };
  // Each thread checks the columns of O that it holds.
#pragma unroll 1
  for (int key = 0; key < keys; ++key) {
    bool reaches[2] = {};
    if constexpr (is_long) {
      bool finite = true;
#pragma unroll
      for (int group = 0; group < S::width_v / 8; ++group) finite = finite && !has_nonfinite<S::type>(pair_of(key, group));
      if (finite) continue;
#pragma unroll 1
      for (int r = 0; r < 2; ++r) {
        if (math.reaches_output(wg.args, tile, math.row + 8 * r, kv_begin + key)) (r == 0 ? reaches[0] : reaches[1]) = true;
      }
    }
#pragma unroll
    for (int group = 0; group < S::width_v / 8; ++group) {
      const unsigned pair = pair_of(key, group);
      if (!has_nonfinite<S::type>(pair)) continue;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (is_long ? !reaches[r] : !math.reaches_output(wg.args, tile, math.row + 8 * r, kv_begin + key)) continue;
        const float low = ptx::unpack_low<S::type>(pair), high = ptx::unpack_high<S::type>(pair);
        O[4 * group + 2 * r] += low - low == 0.0f ? 0.0f : low;
        O[4 * group + 2 * r + 1] += high - high == 0.0f ? 0.0f : high;
      }
    }
  }
}

/// ... and replaces them by 0, so that P V does not touch other rows.
template <ForwardConfig config>
__device__ __forceinline__ void clear_nonfinite(const Warpgroup<config>& wg, int v_stage) {
  using S = Shape<config>;
  const unsigned V_smem = ptx::shared_address(wg.shared.V[v_stage]);
  ptx::barrier_sync(barrier_attend, S::warpgroups * wg_threads);  // all warpgroups have read the original V
#pragma unroll 1
  for (int i = wg.warpgroup * wg_threads + wg.thread; i < S::block_kv * S::chunks_v * 32; i += S::warpgroups * wg_threads) {
    const unsigned pair = ptx::load_shared<unsigned>(V_smem + 4 * i);
    if (has_nonfinite<S::type>(pair)) ptx::store_shared(V_smem + 4 * i, 0u);
  }
  ptx::fence_async_shared();                                      // orders the zeros before the products' reads
  ptx::barrier_sync(barrier_attend, S::warpgroups * wg_threads);  // all warpgroups have written their zeros
}
template <ForwardConfig config>
__device__ __forceinline__ void attend_nonfinite_safe(Warpgroup<config>& wg, Output<config>& out) {
  using S = Shape<config>;
  const Tile tile = tile_of(wg);
  const ScoreMath<config> math = score_math(wg, tile);
  typename Warpgroup<config>::QueryTile queries;
  typename Warpgroup<config>::ScoreTile scores;
  typename Warpgroup<config>::PackedTile P;
  float rescale[2];
#pragma unroll
  for (float& x : out.O) x = 0;

  bool is_first = true;  // of the segments
  typename Warpgroup<config>::SeenBlock at;
#pragma unroll 1
  for (int n = 0; S::listed ? !at.is_last() : n < tile.blocks; ++n) {
    const PipelineState<S::stages> kv(wg.num_blocks++);
    ptx::mbarrier_wait(wg.shared.K_full[kv.stage], kv.phase);  // K has landed
    if constexpr (S::listed) at = listed_block(wg, kv.stage), load_words(wg, math, at);
    const int block = S::listed ? at.block() : block_at<config>(tile, n);
    load_queries(wg, queries);  // for each block: held over the loop, ptxas 13.0 gave their registers to P, 64 columns
    issue_scores(wg, scores, queries, kv.stage);
    math.load_bias(block * S::block_kv);
    ptx::wgmma_wait<0>();  // the scores are ready
    ptx::wgmma_pin(scores);
    release(wg, wg.shared.K_empty[kv.stage]);
    take_biases(wg, math, wg.num_blocks - 1, block * S::block_kv, true);
    release_biases(wg, wg.num_blocks - 1);
    softmax_edge(wg, math, block, scores, out.rows, out.statistics, rescale, at);
    math.drop(scores, math.draw(wg.args, tile, block * S::block_kv));
    rescale_output(out.O, rescale);
    math.pack(scores, P);
    ptx::mbarrier_wait(wg.shared.V_full[kv.stage], kv.phase);  // V has landed
    add_nonfinite<S::block_kv>(wg, out.O, ptx::shared_address(wg.shared.V[kv.stage]), block * S::block_kv, tile, math);
    clear_nonfinite(wg, kv.stage);
    ptx::wgmma_pin(P);
    issue_output(wg, out.O, P, kv.stage, true);
    ptx::wgmma_wait<0>();  // O is complete
    ptx::wgmma_pin(out.O);
    release(wg, wg.shared.V_empty[kv.stage]);
    if constexpr (S::ordered) {
      if (n + 1 == tile.blocks) {
        SegmentTotals<config>{wg, math.exponent_scale}.finish(out.O, out.rows, is_first);
        break;
      }
      if ((block + 1) % S::segment_blocks != 0) continue;
      SegmentTotals<config>{wg, math.exponent_scale}.add(out.O, out.rows, is_first);
      is_first = false;
      out.rows = {};
#pragma unroll
      for (float& x : out.O) x = 0;
    }
  }
  release_queries(wg);
}

}  // namespace flash_attention::forward_sm90
