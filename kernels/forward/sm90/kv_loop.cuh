#pragma once

// A warpgroup of forward/sm90 that attends: 64 query rows of each tile, all blocks of keys.
//
//     S = Q K(first)^T; P = softmax(S)
//     for the other blocks, in the order of Shape::forwards:
//       issue S = Q K^T            then issue O += P V of the block before
//       softmax of S while P V runs; then P = S
//     O += P V(last)
//
// The warpgroups issue products by ping-pong: while one does softmax, another's products run.

#include "forward/sm90/warpgroup.cuh"

namespace flash_attention::forward_sm90 {

/// A warpgroup's loop over the KV blocks of a tile, in Attempt::fixed_max and Attempt::online_max.
template <ForwardConfig config>
struct KvLoop {
  using S = Shape<config>;
  Warpgroup<config>& wg;
  Output<config>& out;
  typename Warpgroup<config>::QueryTile queries;
  typename Warpgroup<config>::ScoreTile scores;
  typename Warpgroup<config>::PackedTile P;
  bool accumulate = false;                   // O holds something of the tile
  bool visited_interior = false;             // if masks choose: some block was full
  bool raised = false;                       // if masks choose: the block of the scores has raised the maximum
  typename Warpgroup<config>::SeenBlock at;  // if masks choose: the block of the scores
  bool has_output = false;                   // if masks choose: P has a block whose output was not issued

  __device__ __forceinline__ void run() {
    const Tile tile = wg.tile();
    const Blocks seen = wg.blocks();
    const ScoreMath<config> math = wg.scores_of(tile);
    wg.load_queries(queries);
    if constexpr (S::holds_queries) wg.sync_without_pingpong();  // all have read Q before one thread releases it
    if constexpr (S::listed) return run_listed(tile, math);
    skip_blocks(wg, seen.begin);
    begin(tile, math, block_at<config>(tile, seen.begin), after(tile, seen, seen.begin));
    visit_others(tile, seen, math);
    wg.release_queries();
    end(math, block_at<config>(tile, seen.end - 1));
    skip_blocks(wg, tile.blocks - seen.end);
  }

 private:
  /// The blocks that come, to the last. Every warpgroup has a turn for each, and one for the end.
  __device__ __forceinline__ void run_listed(const Tile& tile, const ScoreMath<config>& math) {
    if constexpr (!S::skips_listed) {
      find_listed(math);
      begin(tile, math, at.block(), {});
#pragma unroll 1
      while (!at.is_last()) {
        find_listed(math);
        visit<Visit::listed>(tile, math, at.block(), {});
      }
      wg.release_queries();
      return end(math, 0);
    }
#pragma unroll 1
    do {
      find_listed(math);
      if (!at.is_seen()) {
        skip_listed();
      } else if (has_output) {
        visit<Visit::listed>(tile, math, at.block(), {});
      } else {
        begin(tile, math, at.block(), {});
      }
    } while (!at.is_last());
    wg.release_queries();
    if (has_output) return end(math, 0);
    wg.pingpong_wait();
    wg.pingpong_signal();
#pragma unroll
    for (float& x : out.O) x = accumulate ? x : 0.0f;  // nothing was seen
  }
  __device__ __forceinline__ void find_listed(const ScoreMath<config>& math) {
    const PipelineState<S::stages> k(wg.num_blocks);
    ptx::mbarrier_wait(wg.shared.K_full[k.stage], k.phase);  // K has landed
    at = wg.listed_block(k.stage);
    if (S::skips_listed && !at.is_seen()) return;
    math.load_bias(at.block() * S::block_kv);
    wg.load_words(math, at);
  }

  /// The output of the block before is computed in the turn of this one, in one branch: else all products are serialised.
  __device__ __forceinline__ void skip_listed() {
    const PipelineState<S::stages> v(wg.num_blocks - 1);
    skip_block(wg, [&] {
      if (!has_output) return;
      ptx::mbarrier_wait(wg.shared.V_full[v.stage], v.phase);  // V of the block before has landed
      wg.issue_output(out.O, P, v.stage, accumulate);
      ptx::wgmma_wait<0>();  // O and P are ours again
      ptx::wgmma_pin(out.O);
      wg.release(wg.shared.V_empty[v.stage]);
      has_output = false, accumulate = true;
    });
  }

  /// All blocks but the first, whose probabilities are in P.
  __device__ __forceinline__ void visit_others(const Tile& tile, const Blocks& seen, const ScoreMath<config>& math) {
    int n = seen.begin + 1;
    // With a mask tensor, and in Attempt::online_max, there is no interior: all is edge.
#pragma unroll 1
    for (; n < seen.interior_begin; ++n) visit<Visit::edge>(tile, math, block_at<config>(tile, n), after(tile, seen, n));
    if constexpr (!config.features.mask) {
#pragma unroll 1
      for (; n < seen.interior_end; ++n)
        visit<Visit::interior>(tile, math, block_at<config>(tile, n), after(tile, seen, n));
    }
    if constexpr (!config.features.mask && (S::forwards || S::left_edge || S::from_diagonal)) {
#pragma unroll 1
      for (; n < seen.end; ++n) visit<Visit::late_edge>(tile, math, block_at<config>(tile, n), after(tile, seen, n));
    }
  }

  /// The block after the n-th and one further on, if there are such.
  static constexpr int no_block = -1;
  struct NextBlocks {
    int next = no_block, later = no_block;
  };
  __device__ __forceinline__ static NextBlocks after(const Tile& tile, const Blocks& seen, int n) {
    constexpr int distance = 4;  // of a bias, from memory to L2 in time
    return {n + 1 < seen.end ? block_at<config>(tile, n + 1) : no_block,
            n + distance < seen.end ? block_at<config>(tile, n + distance) : no_block};
  }
  /// Biases are prefetched a whole block ahead, unless it is not known which comes next.
  __device__ __forceinline__ void load_bias(const ScoreMath<config>& math, const NextBlocks& following) const {
    if (following.next != no_block) math.load_bias(following.next * S::block_kv);
    if (following.later != no_block) math.prefetch_bias(following.later * S::block_kv);
  }

  /// The scores of a tile's first block.
  __device__ __forceinline__ void begin(const Tile& tile, const ScoreMath<config>& math, int block,
                                        const NextBlocks& following) {
    const PipelineState<S::stages> k(wg.num_blocks++);
    if constexpr (!S::listed) {
      math.load_bias(block * S::block_kv);
      ptx::mbarrier_wait(wg.shared.K_full[k.stage], k.phase);  // K has landed
    }
    wg.pingpong_wait();
    wg.issue_scores(scores, queries, k.stage);
    wg.pingpong_signal();
    ptx::wgmma_wait<0>();  // the scores are ready
    ptx::wgmma_pin(scores);
    if constexpr (S::holds_queries) ptx::wgmma_pin(queries);
    wg.release(wg.shared.K_empty[k.stage]);
    float rescale[2];
    take_biases(wg, math, wg.num_blocks - 1, block * S::block_kv, true);
    release_biases(wg, wg.num_blocks - 1);
    wg.softmax_edge(math, block, scores, out.rows, rescale, at);
    if constexpr (S::listed) {
      if (S::skips_listed && accumulate) wg.rescale_output(out.O, rescale);
      visited_interior = visited_interior || !at.tested();
      has_output = true;
    }
    load_bias(math, following);
    math.drop(scores, math.draw(wg.args, tile, block * S::block_kv));
    math.pack(scores, P);
    ptx::wgmma_pin(P);
    if constexpr (!S::forwards || S::listed) clear_hidden_rows(wg, k, math.score.visible_kv - block * S::block_kv);
  }

  /// One block: its scores, the output of the block before, its softmax.
  template <Visit kind>
  __device__ __forceinline__ void visit(const Tile& tile, const ScoreMath<config>& math, int block,
                                        const NextBlocks& following) {
    const PipelineState<S::stages> k(wg.num_blocks), v(wg.num_blocks - 1);
    float rescale[2];
    if constexpr (kind != Visit::listed) ptx::mbarrier_wait(wg.shared.K_full[k.stage], k.phase);  // K has landed
    wg.pingpong_wait();
    wg.issue_scores(scores, queries, k.stage);
    ptx::mbarrier_wait(wg.shared.V_full[v.stage], v.phase);  // V of the block before has landed
    wg.issue_output(out.O, P, v.stage, accumulate);
    wg.pingpong_signal();
    accumulate = true;
    ++wg.num_blocks;
    const auto draw = math.draw(wg.args, tile, block * S::block_kv);
    ptx::wgmma_wait<1>();  // the scores are ready; P V may still run
    ptx::wgmma_pin(scores);
    if constexpr (S::holds_queries) ptx::wgmma_pin(queries);
    wg.release(wg.shared.K_empty[k.stage]);
    take_biases(wg, math, wg.num_blocks - 1, block * S::block_kv, kind != Visit::interior);
    if constexpr (kind == Visit::edge) {
      ptx::path<"forward/sm90 edge block">();
      wg.softmax_edge(math, block, scores, out.rows, rescale);
    } else if constexpr (kind == Visit::listed) {
      softmax_listed(math, block, rescale);
    } else if constexpr (kind == Visit::interior) {
      ptx::path<"forward/sm90 inner block">();
      math.probability_of(scores, block * S::block_kv, out.rows.max, out.rows.sum);
    } else {
      ptx::path<"forward/sm90 late edge block">();
      math.template modify_and_mask<!S::forwards && !S::from_diagonal>(scores, block * S::block_kv);
      math.exponentiate(scores, out.rows.max, out.rows.sum);
    }
    release_biases(wg, wg.num_blocks - 1);
    load_bias(math, following);
    math.drop(scores, draw);
    ptx::wgmma_wait<0>();  // P V is done: O and P are ours again
    ptx::wgmma_pin(out.O);
    ptx::wgmma_pin(P);
    wg.release(wg.shared.V_empty[v.stage]);
    if (kind == Visit::edge || (kind == Visit::listed && raised)) wg.rescale_output(out.O, rescale);
    math.pack(scores, P);
    ptx::wgmma_pin(P);
    if constexpr (kind == Visit::listed) clear_hidden_rows(wg, k, math.score.visible_kv - block * S::block_kv);
  }

  /// A row that has seen nothing yet takes 0 as its reference from the first full block on; a later maximum rescales it.
  /// Tested blocks need not raise it either once all rows of the warp have seen something.
  __device__ __forceinline__ void softmax_listed(const ScoreMath<config>& math, int block, float (&rescale)[2]) {
    raised = at.raises();
    if (S::keeps_tested && at.tested() && !raised)
      raised = ptx::any(ptx::min(out.rows.max[0], out.rows.max[1]) == -tile::infinity);
    if (raised) {
      ptx::path<"forward/sm90 listed edge block">();
      wg.softmax_edge(math, block, scores, out.rows, rescale, at);
    } else if (S::keeps_tested && at.tested()) {
      ptx::path<"forward/sm90 listed block by its reference">();
      math.modify(scores, block * S::block_kv);
      if constexpr (S::mask_words) wg.hide_tested(math, scores, at);
      math.exponentiate(scores, out.rows.max, out.rows.sum);
    } else {
      ptx::path<"forward/sm90 listed full block">();
#pragma unroll
      for (float& maximum : out.rows.max) maximum = ScoreMath<config>::finite(maximum);
      math.probability_of(scores, block * S::block_kv, out.rows.max, out.rows.sum);
    }
    visited_interior = visited_interior || !at.tested();
  }

  /// The output of the last block.
  __device__ __forceinline__ void end(const ScoreMath<config>& math, int block) {
    const PipelineState<S::stages> v(wg.num_blocks - 1);
    ptx::mbarrier_wait(wg.shared.V_full[v.stage], v.phase);  // V has landed
    if constexpr ((S::forwards && !S::listed) || S::from_diagonal)
      clear_hidden_rows(wg, v, math.score.visible_kv - block * S::block_kv);
    wg.pingpong_wait();
    wg.issue_output(out.O, P, v.stage, accumulate);
    wg.pingpong_signal();
    ptx::wgmma_wait<0>();  // O is complete
    ptx::wgmma_pin(out.O);
    wg.release(wg.shared.V_empty[v.stage]);
  }
};

}  // namespace flash_attention::forward_sm90
