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

#include "forward/sm90/bias_boxes.cuh"
#include "forward/sm90/consumer.cuh"
#include "ptx/path.cuh"

namespace flash_attention::forward_sm90 {

/// Blocks that only other warpgroups see. The ping-pong goes on. V is loaded after K, but copies land in any
/// order: a stage that is freed while its K is still in flight lets the next wait for that stage return at once.
template <ForwardConfig config>
__device__ __forceinline__ void skip_blocks(Warpgroup<config>& wg, int blocks) {
  using S = Shape<config>;
#pragma unroll 1
  for (; blocks > 0; --blocks) {
    ptx::path<"forward/sm90 skipped block">();
    const PipelineState<S::stages> kv(wg.num_blocks++);
    ptx::mbarrier_wait(wg.shared.K_full[kv.stage], kv.phase);
    ptx::mbarrier_wait(wg.shared.V_full[kv.stage], kv.phase);
    wg.sync_without_pingpong();  // no warp has missed a phase
    wg.pingpong_wait();
    wg.pingpong_signal();
    wg.release(wg.shared.K_empty[kv.stage]);
    wg.release(wg.shared.V_empty[kv.stage]);
    if constexpr (S::bias_stages > 0) {
      const PipelineState<S::bias_stages> bias(wg.num_blocks - 1);
      if (has_bias_boxes(wg.args)) ptx::mbarrier_wait(wg.shared.bias_full[bias.stage][wg.warpgroup], bias.phase);
      release_biases(wg, wg.num_blocks - 1);
    }
  }
}

/// What a block's softmax does:
///   edge        tests every score against the mask and raises the maximum
///   interior    tests nothing and keeps the maximum. Probabilities may exceed 1, which costs no precision; Epilogue finds
///               out whether they exceeded what the types can hold
///   late_edge   after the interior: tests every score and keeps the maximum
///   listed      if masks choose the blocks: each says whether it is an edge or interior, in any order
enum class Visit { edge, interior, late_edge, listed };

/// A warpgroup's loop over the KV blocks of a tile, in Attempt::fixed_max and Attempt::online_max.
template <ForwardConfig config>
struct KvLoop {
  using S = Shape<config>;

  Warpgroup<config>& wg;
  Output<config>& out;
  typename Warpgroup<config>::QueryTile queries;
  typename Warpgroup<config>::ScoreTile scores;
  typename Warpgroup<config>::PackedTile P;
  bool accumulate = false;        // O holds something of the tile
  bool visited_interior = false;  // if masks choose: some block was full
  bool raised = false;            // if masks choose: the block of the scores has raised the maximum
  ListedBlock at;                 // if masks choose: the block of the scores

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
  /// Blocks in the order in which the producer sends them.
  __device__ __forceinline__ void run_listed(const Tile& tile, const ScoreMath<config>& math) {
    begin(tile, math, 0, {});
#pragma unroll 1
    while (!at.is_last()) visit<Visit::listed>(tile, math, 0, {});
    wg.release_queries();
    end(math, 0);
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
    if constexpr (!S::listed) math.load_bias(block * S::block_kv);
    ptx::mbarrier_wait(wg.shared.K_full[k.stage], k.phase);  // K has landed
    if constexpr (S::listed) at = wg.listed_block(k.stage), block = at.block(), math.load_bias(block * S::block_kv);
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
    if constexpr (S::listed) visited_interior = !at.tested();
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
    ptx::mbarrier_wait(wg.shared.K_full[k.stage], k.phase);  // K has landed
    if constexpr (kind == Visit::listed)
      at = wg.listed_block(k.stage), block = at.block(), math.load_bias(block * S::block_kv);
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
