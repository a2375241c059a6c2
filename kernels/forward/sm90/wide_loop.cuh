#pragma once

// forward/sm90 with head dimensions above 256. O of 64 rows is too wide for one warpgroup's registers, so two have the same
// rows, and each has half of O's columns. Of a block of 128 keys each has the scores of 64, so no score is computed twice;
// P goes through shared memory, where the products of both read it.
//
//     S = Q K(first)^T of my keys; P = softmax(S) to shared memory
//     for the other blocks:
//       issue S = Q K^T, by chunks of 64 columns; wait for the other's P of the block before
//       issue O += P V of the block before, by stages of keys; between them, softmax of S to the other place of P
//     O += P V(last)
//
// An edge block raises the maximum that both use: they tell each other theirs. An interior block keeps it as a reference
// (kv_loop.cuh), and there is nothing to tell. Row sums are of a warpgroup's own keys until the end of the tile.

#include "forward/sm90/kv_loop.cuh"
#include "forward/sm90/wide_products.cuh"
#include "ptx/path.cuh"

namespace flash_attention::forward_sm90 {

template <ForwardConfig config, bool safe>
struct WideLoop {
  using S = Shape<config>;

  Warpgroup<config>& wg;
  Output<config>& out;
  WideProducts<config> products{wg};
  typename Warpgroup<config>::ScoreTile scores;
  float rescale[2];                          // of O, by the block of the scores
  bool accumulate = false;                   // O holds something of the tile
  bool visited_interior = false;             // if masks choose: some block was full
  typename Warpgroup<config>::SeenBlock at;  // if masks choose: the block of the scores
  int in_P = 0;                              // the block that is in P

  __device__ __forceinline__ void run() {
    const Tile tile = wg.tile();
    const Blocks seen = wg.blocks();
    const ScoreMath<config> math = wg.scores_of(tile);
    if constexpr (safe) {
#pragma unroll
      for (float& x : out.O) x = 0;
      accumulate = true;
    }
    begin(tile, math, block_at<config>(tile, 0));
    if constexpr (S::listed) {
#pragma unroll 1
      while (!at.is_last()) visit<Visit::listed>(tile, math, 0);
    } else {
      int n = 1;
#pragma unroll 1
      for (; n < seen.interior_begin; ++n) visit<Visit::edge>(tile, math, block_at<config>(tile, n));
      if constexpr (!config.features.mask && !safe) {
#pragma unroll 1
        for (; n < seen.interior_end; ++n) visit<Visit::interior>(tile, math, block_at<config>(tile, n));
        if constexpr (S::forwards || config.features.window_left) {
#pragma unroll 1
          for (; n < seen.end; ++n) visit<Visit::late_edge>(tile, math, block_at<config>(tile, n));
        }
      }
    }
    wg.release_queries();
    end(tile, math);
  }

 private:
  /// The first key of this warpgroup's scores of a block.
  __device__ __forceinline__ int key_of(int block) const { return block * S::block_kv + wg.warpgroup * S::score_keys; }

  /// The first block: its scores and its softmax.
  __device__ __forceinline__ void begin(const Tile& tile, const ScoreMath<config>& math, int block) {
    block = issue_first_chunk(block);
    products.issue_other_chunks(scores);
    finish_scores();
    softmax_edge(math, block, at.tested());
    visited_interior = S::listed && !at.tested();
    math.drop(scores, math.draw(wg.args, tile, key_of(block)));
    products.begin_P();
    keep(math, block);
  }

  /// One block: its scores, the output of the block before, its softmax.
  template <Visit kind>
  __device__ __forceinline__ void visit(const Tile& tile, const ScoreMath<config>& math, int block) {
    block = issue_first_chunk(block);
    products.issue_other_chunks(scores);
    products.wait_for_P();
    const auto draw = math.draw(wg.args, tile, key_of(block));
    constexpr bool by_parts = kind == Visit::interior && !config.features.touches_scores() && !safe;
    if constexpr (safe) {
      finish_scores();
      products.add_safely(out.O, in_P * S::block_kv, tile, math);
    } else if constexpr (by_parts) {
      ptx::path<"forward/sm90 wide plain inner block">();
      softmax_by_parts(math);
    } else {
      products.template issue_output<true>(out.O, in_P * S::block_kv, accumulate, math, [](int) {});
      ptx::wgmma_pin(scores);  // they are ready; the end of P V may still run
    }
    if constexpr (!by_parts) softmax<kind>(math, block);
    math.drop(scores, draw);
    if constexpr (!safe) finish_output();
    if (kind == Visit::edge || (kind == Visit::listed && at.raises())) wg.rescale_output(out.O, rescale);
    accumulate = true;
    if constexpr (!by_parts) return keep(math, block);
    products.publish_P();
    in_P = block;
  }

  /// The output of the block before, and between its stages the softmax of an interior block, which goes to P: tensor cores
  /// and exponentials work at the same time.
  __device__ __forceinline__ void softmax_by_parts(const ScoreMath<config>& math) {
    constexpr int steps = S::score_keys / 16, stages = WideProducts<config>::value_stages;
    RowState& rows = out.rows;
    float shift[2], sums[2][2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) shift[r] = -ScoreMath<config>::finite(rows.max[r]) * math.exponent_scale;
    products.template issue_output<true>(out.O, in_P * S::block_kv, accumulate, math, [&](int n) {
      if (n == 1) ptx::wgmma_pin(scores);
#pragma unroll
      for (int step = 0; step < steps; ++step) {
        if (1 + step * (stages - 1) / steps != n) continue;
        unsigned of_step[4];
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
          const int r = i / 2 % 2;
          const float p = ptx::exp2(ptx::fma(scores[8 * step + i], math.exponent_scale, shift[r]));
          const float q = ptx::exp2(ptx::fma(scores[8 * step + i + 1], math.exponent_scale, shift[r]));
          sums[r][0] += p, sums[r][1] += q;
          of_step[i / 2] = ptx::pack<S::type>(p, q);
        }
        products.store_P(step, of_step);
      }
    });
#pragma unroll
    for (int r = 0; r < 2; ++r) rows.sum[r] += sums[r][0] + sums[r][1];
  }

  /// The output of the last block.
  __device__ __forceinline__ void end(const Tile& tile, const ScoreMath<config>& math) {
    products.wait_for_P();
    if constexpr (safe) return products.add_safely(out.O, in_P * S::block_kv, tile, math);
    products.template issue_output<false>(out.O, in_P * S::block_kv, accumulate, math, [](int) {});
    finish_output();
  }

  __device__ __forceinline__ void finish_scores() {
    ptx::wgmma_wait<0>();  // the scores are ready
    ptx::wgmma_pin(scores);
    products.release_stages(1);
  }
  __device__ __forceinline__ void finish_output() {
    ptx::wgmma_wait<0>();  // O is ours again
    ptx::wgmma_pin(out.O);
    products.release_stages(1);
  }

  template <Visit kind>
  __device__ __forceinline__ void softmax(const ScoreMath<config>& math, int block) {
    if constexpr (kind == Visit::edge) {
      ptx::path<"forward/sm90 wide edge block">();
      softmax_edge(math, block, true);
    } else if constexpr (kind == Visit::listed) {
      softmax_listed(math, block);
    } else if constexpr (kind == Visit::interior) {
      ptx::path<"forward/sm90 wide inner block">();
      math.probability_of(scores, key_of(block), out.rows.max, out.rows.sum);
    } else {
      ptx::path<"forward/sm90 wide late edge block">();
      math.template modify_and_mask<!S::forwards>(scores, key_of(block));
      math.exponentiate(scores, out.rows.max, out.rows.sum);
    }
  }

  /// If masks choose, the first stage of a block says which one it is.
  __device__ __forceinline__ int issue_first_chunk(int block) {
    const int stage = products.wait_for_stage();
    if constexpr (S::listed) at = wg.listed_block(stage), block = at.block();
    products.issue_chunk(scores, 0, stage);
    return block;
  }

  /// Scores become P.
  __device__ __forceinline__ void keep(const ScoreMath<config>& math, int block) {
    typename Warpgroup<config>::PackedTile P;
    math.pack(scores, P);
#pragma unroll
    for (int step = 0; step < S::score_keys / 16; ++step) products.store_P(step, P[step]);
    products.publish_P();
    in_P = block;
  }

  /// Warpgroup::softmax_edge, with the larger of both maxima.
  __device__ __forceinline__ void softmax_edge(const ScoreMath<config>& math, int block, bool tested) {
    const int wg_begin = ptx::registers_fresh(math.row) / wg_rows * wg_rows, kv_begin = key_of(block);
    if constexpr (modifies_first<config.features>) {
      modify_then_hide(math, scores, kv_begin, [&] {
        return S::listed ? !tested : math.score.template all_visible<wg_rows, S::score_keys>(wg_begin, kv_begin);
      });
    } else if (S::listed ? !tested : math.score.template all_visible<wg_rows, S::score_keys>(wg_begin, kv_begin)) {
      math.modify(scores, kv_begin);
    } else {
      math.modify_and_mask(scores, kv_begin);
      if constexpr (tile::MaskData<config.features>::present) hide_pairs(math, scores, kv_begin);
    }
    RowState& rows = out.rows;
    float before[2] = {rows.max[0], rows.max[1]}, other[2];
    math.raise_maximum(scores, rows.max, rescale);
#pragma unroll
    for (int r = 0; r < 2; ++r) other[r] = rows.max[r];
    exchange(wg, other);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      rows.max[r] = ptx::max(rows.max[r], other[r]);
      rescale[r] = ptx::exp2((before[r] - ScoreMath<config>::finite(rows.max[r])) * math.exponent_scale);
      rows.sum[r] *= rescale[r];
    }
    math.exponentiate_any(scores, rows.max, rows.sum);
  }

  /// As KvLoop::softmax_listed.
  __device__ __forceinline__ void softmax_listed(const ScoreMath<config>& math, int block) {
    if (at.raises()) {
      ptx::path<"forward/sm90 wide listed edge block">();
      softmax_edge(math, block, at.tested());
    } else {
      ptx::path<"forward/sm90 wide listed full block">();
#pragma unroll
      for (float& maximum : out.rows.max) maximum = ScoreMath<config>::finite(maximum);
      math.probability_of(scores, key_of(block), out.rows.max, out.rows.sum);
    }
    visited_interior = visited_interior || !at.tested();
  }
};

/// One tile. Returns whether some block was full and its scores were not searched for a maximum. The
/// nonfinite-safe attempt searches every block, so there a row that saw only -inf is empty.
template <ForwardConfig config>
__device__ __forceinline__ bool attend_wide(Warpgroup<config>& wg, Output<config>& out, bool safe) {
  if (safe) {
    ptx::path<"forward/sm90 wide nonfinite-safe tile">();
    WideLoop<config, true>{wg, out}.run();
    return false;
  }
  WideLoop<config, false> loop{wg, out};
  loop.run();
  return loop.visited_interior;
}

}  // namespace flash_attention::forward_sm90
