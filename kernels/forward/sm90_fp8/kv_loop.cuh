#pragma once

// The loop of a consumer warpgroup of forward/sm90_fp8: 64 query rows of a tile, all KV blocks.
//
//     S = Q K(first)^T; P = softmax(S)
//     for the other blocks:
//       issue S = Q K^T; every few blocks, while it runs: sums += O, O = 0
//       issue O += P V of the previous block
//       P = softmax(S)
//     O += P V(last);  O += sums
//
// The warpgroups issue products alternately (ping-pong): while one computes its softmax, products of another run.

#include "forward/sm90_fp8/consumer.cuh"
#include "ptx/path.cuh"

namespace flash_attention::forward_sm90_fp8 {

template <ForwardConfig config>
struct KvLoop {
  using S = Shape<config>;
  using Rows = Softmax<config>;

  Warpgroup<config>& wg;
  typename Warpgroup<config>::OutputTile& O;
  RowState& rows;
  typename Warpgroup<config>::ScoreTile scores;
  typename Warpgroup<config>::PackedTile P;
  float since_flush[2] = {1, 1};  // the sums in fp32 must still be multiplied by this factor
  int blocks_in_O = 0;
  bool flushed = false;
  bool needs_check = false;  // a row of this thread has no reference yet, or a large one

  __device__ __forceinline__ void run() {
    const Tile tile = tile_of(wg);
    const Blocks seen = blocks_of(wg);
    const ScoreMath<config> math = score_math(wg, tile);
    skip_blocks(wg, seen.begin);
    begin(math, block_at<config>(tile, seen.begin), after<config>(tile, seen, seen.begin));
    int n = seen.begin + 1;
#pragma unroll 1
    for (; n < seen.interior_begin; ++n) visit<true>(math, block_at<config>(tile, n), after<config>(tile, seen, n));
#pragma unroll 1
    for (; n < seen.interior_end; ++n) visit<false>(math, block_at<config>(tile, n), after<config>(tile, seen, n));
#pragma unroll 1
    for (; n < seen.end; ++n) visit<true>(math, block_at<config>(tile, n), after<config>(tile, seen, n));
    release_queries(wg);
    end();
    skip_blocks(wg, tile.blocks - seen.end);
  }

 private:
  template <bool tested>
  __device__ __forceinline__ void make_scores(const ScoreMath<config>& math, int block) {
    if constexpr (tested) {
      ptx::path<"forward/sm90_fp8 edge block">();
      math.modify_and_mask(scores, block * S::block_kv);
    } else {
      ptx::path<"forward/sm90_fp8 inner block">();
      math.template modify<true>(scores, block * S::block_kv);
    }
  }

  /// Scores and P of a tile's first block.
  __device__ __forceinline__ void begin(const ScoreMath<config>& math, int block, const NextBlocks& following) {
    math.load_bias(block * S::block_kv);
    const PipelineState<S::stages> k(wg.num_blocks++);
    ptx::mbarrier_wait(wg.shared.K_full[k.stage], k.phase);  // K has landed
    pingpong_wait(wg);
    wg.issue_scores(scores, k.stage);
    pingpong_signal(wg);
    ptx::wgmma_wait<0>();  // the scores are ready
    ptx::wgmma_pin(scores);
    release(wg, wg.shared.K_empty[k.stage]);
    take_biases(wg, math, wg.num_blocks - 1, block * S::block_kv, true);
    release_biases(wg, wg.num_blocks - 1);
    const int wg_begin = ptx::hide_from_compiler(math.row) / wg_rows * wg_rows;
    if (math.score.sight.template all_visible<wg_rows, S::block_kv>(wg_begin, block * S::block_kv)) {
      make_scores<false>(math, block);
    } else {
      make_scores<true>(math, block);
    }
    load_biases(math, following);
    float rescale[2];
    Rows::raise(math, scores, rows, rescale);
    exponentiate(math, ptx::any(Rows::is_large(math, rows))).add_to(rows);
    ptx::wgmma_pin(P);
  }

  /// Computes P after the references have been raised. `large`: a reference of the warp is large.
  __device__ __forceinline__ typename Rows::Sums exponentiate(const ScoreMath<config>& math, bool large) {
    needs_check = Rows::is_large_or_none(math, rows);
    if (large) Rows::subtract_max(rows, scores);
    return Rows::exponentiate(math, scores, rows, P, large);
  }

  /// A later block: its scores, the output of the previous block, its softmax.
  template <bool tested>
  __device__ __forceinline__ void visit(const ScoreMath<config>& math, int block, const NextBlocks& following) {
    const PipelineState<S::stages> k(wg.num_blocks), v(wg.num_blocks - 1);
    ptx::mbarrier_wait(wg.shared.K_full[k.stage], k.phase);  // K has landed
    pingpong_wait(wg);
    wg.issue_scores(scores, k.stage);
    if (S::keeps_sums && blocks_in_O == S::flush_blocks) flush();
    ptx::mbarrier_wait(wg.shared.V_full[v.stage], v.phase);  // V of the previous block has landed
    wg.issue_output(O, P, v.stage, blocks_in_O != 0);
    pingpong_signal(wg);
    ++wg.num_blocks;
    ++blocks_in_O;
    ptx::wgmma_wait<1>();  // the scores are ready; P V may still run
    ptx::wgmma_pin(scores);
    release(wg, wg.shared.K_empty[k.stage]);
    take_biases(wg, math, wg.num_blocks - 1, block * S::block_kv, true);
    release_biases(wg, wg.num_blocks - 1);
    make_scores<tested>(math, block);
    load_biases(math, following);
    float rescale[2];
    bool raised = false;
    ptx::wgmma_wait<0>();  // P V is done: O and P may be read and written again
    ptx::wgmma_pin(O);
    ptx::wgmma_pin(P);
    release(wg, wg.shared.V_empty[v.stage]);
    auto sums = Rows::exponentiate(math, scores, rows, P);
    if (ptx::any(sums.exceed_limit() || needs_check)) {
      raised = Rows::raise(math, scores, rows, rescale);
      const bool large = ptx::any(Rows::is_large(math, rows));
      if (raised || large) {
        ptx::path<"forward/sm90_fp8 probabilities again">();
        sums = exponentiate(math, large);
      }
    }
    ptx::wgmma_pin(P);
    sums.add_to(rows);
    if (raised) rescale_output(rescale);
  }

  __device__ __forceinline__ void flush() {
    ptx::path<"forward/sm90_fp8 flush">();
    if (!flushed) wg.take_sums();
    if constexpr (S::keeps_sums) wg.flush(O, since_flush, !flushed);
    since_flush[0] = since_flush[1] = 1;
    blocks_in_O = 0;
    flushed = true;
  }

  __device__ __forceinline__ void rescale_output(const float (&rescale)[2]) {
    ptx::path<"forward/sm90_fp8 raised reference">();
#pragma unroll
    for (int i = 0; i < S::width_v / 2; ++i) O[i] *= rescale[i / 2 % 2];
#pragma unroll
    for (int r = 0; r < 2; ++r) since_flush[r] *= rescale[r];
  }

  /// O += P V of the last block, then O += sums.
  __device__ __forceinline__ void end() {
    const PipelineState<S::stages> v(wg.num_blocks - 1);
    ptx::mbarrier_wait(wg.shared.V_full[v.stage], v.phase);  // V has landed
    if (S::keeps_sums && blocks_in_O == S::flush_blocks) flush();
    pingpong_wait(wg);
    wg.issue_output(O, P, v.stage, blocks_in_O != 0);
    pingpong_signal(wg);
    ptx::wgmma_wait<0>();  // O is complete
    ptx::wgmma_pin(O);
    release(wg, wg.shared.V_empty[v.stage]);
    if constexpr (S::keeps_sums) {
      if (flushed) wg.add_sums(O, since_flush);
    }
  }
};

}  // namespace flash_attention::forward_sm90_fp8
