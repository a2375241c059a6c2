#pragma once

// The loop of a consumer warpgroup of forward/sm90 over the KV blocks of a tile: 64 query rows, a range of blocks.
//
//     S = Q K(first)^T;  P = softmax(S)                                    first_block
//     for each other block n (order: ForwardLoop::key_order):              next_block
//       issue S = Q K(n)^T
//       issue O += P V(n - 1)
//       wait for S;  softmax of S, while P V is still running
//       wait for O;  P = S in 16 bits
//     O += P V(last)                                                       last_output
//
// So the output of a block is one step late, and every softmax has a product to overlap with. In addition the warpgroups
// take turns to issue products (ping-pong barriers): while one warpgroup is in its softmax, products of another run.
//
// Two rules keep ptxas from serialising all products (a compile report tells if it did): a product is issued only in a
// branch that the whole warpgroup takes, and no product is in flight across a branch that may diverge.

#include "forward/sm90/warpgroup.cuh"

namespace flash_attention::forward_sm90 {

/// What the softmax of a block does:
///   edge        tests whether each score is visible; raises the maximum
///   interior    all scores are visible; keeps the maximum. Probabilities may exceed 1, without loss of precision; the
///               epilogue detects overflow
///   late_edge   follows the interior: tests each score, keeps the maximum
///   listed      if masks choose the blocks: the block says whether it is edge or interior; they come in any order
enum class Visit { edge, interior, late_edge, listed };

/// A warpgroup's state within a tile. It is a local variable of the loop's caller. All functions that get a reference to it
/// are inlined, so all of it stays in registers.
template <class W>
struct TileWork {
  W& wg;
  Output<W::config>& out;
  typename W::QueryTile queries;
  typename W::ScoreTile scores;  // of a block, then its probabilities
  typename W::PackedTile P;      // of the block whose P V is next
  bool accumulate = false;       // O already holds a sum of this tile
  // If masks choose the blocks (listed_loop.cuh).
  bool visited_interior = false;  // some block was full
  bool raised = false;            // the block of the scores has raised the maximum
  typename W::SeenBlock at;       // the block of the scores
  bool has_output = false;        // P has a block whose output was not issued
};

/// The next block, and the one whose biases are prefetched, if they exist.
constexpr int no_block = -1;
struct NextBlocks {
  int next = no_block, later = no_block;
};

/// Loads the biases of the next block to registers, and prefetches those of a later block into L2.
template <ForwardConfig config>
__device__ __forceinline__ void load_biases(const ScoreMath<config>& math, const NextBlocks& following) {
  if (following.next != no_block) math.load_bias(following.next * config.block_kv);
  if (following.later != no_block) math.prefetch_bias(following.later * config.block_kv);
}

/// Scores and P of a tile's first block. softmax(block, rescale) turns the scores into probabilities. If the block is
/// listed, its K has already landed and its biases are being loaded: its number was read together with its K.
template <class W, class Softmax>
__device__ __forceinline__ void first_block(TileWork<W>& work, const Tile& tile, const ScoreMath<W::config>& math,
                                            int block, const NextBlocks& following, const Softmax& softmax) {
  using S = typename W::S;
  const PipelineState<S::stages> k(work.wg.num_blocks++);
  if constexpr (!S::listed) {
    math.load_bias(block * S::block_kv);
    ptx::mbarrier_wait(work.wg.shared.K_full[k.stage], k.phase);  // K has landed
  }
  pingpong_wait(work.wg);
  issue_scores(work.wg, work.scores, work.queries, k.stage);
  pingpong_signal(work.wg);
  ptx::wgmma_wait<0>();  // the scores are ready
  ptx::wgmma_pin(work.scores);
  if constexpr (S::holds_queries) ptx::wgmma_pin(work.queries);
  release(work.wg, work.wg.shared.K_empty[k.stage]);
  take_biases(work.wg, math, work.wg.num_blocks - 1, block * S::block_kv, true);
  release_biases(work.wg, work.wg.num_blocks - 1);
  float rescale[2];
  softmax(block, rescale);
  load_biases(math, following);
  math.drop(work.scores, math.draw(work.wg.args, tile, block * S::block_kv));
  math.pack(work.scores, work.P);
  ptx::wgmma_pin(work.P);
  // Rows of V after the last visible key must be zero before they are multiplied. Backwards, they are in this block.
  if constexpr (!S::forwards || S::listed) clear_hidden_rows(work.wg, k, math.score.sight.visible_kv - block * S::block_kv);
}

/// A later block: its scores, the output of the previous block, its softmax. softmax(block, rescale) returns true if it has
/// raised the maximum of a row; then O must be multiplied by `rescale`, or whatever take_output(block, rescale) does.
template <Visit kind, class W, class Softmax, class TakeOutput>
__device__ __forceinline__ void next_block(TileWork<W>& work, const Tile& tile, const ScoreMath<W::config>& math, int block,
                                           const NextBlocks& following, const Softmax& softmax,
                                           const TakeOutput& take_output) {
  using S = typename W::S;
  const PipelineState<S::stages> k(work.wg.num_blocks), v(work.wg.num_blocks - 1);
  float rescale[2];
  if constexpr (kind != Visit::listed) ptx::mbarrier_wait(work.wg.shared.K_full[k.stage], k.phase);  // K has landed
  pingpong_wait(work.wg);
  issue_scores(work.wg, work.scores, work.queries, k.stage);
  ptx::mbarrier_wait(work.wg.shared.V_full[v.stage], v.phase);  // V of the previous block has landed
  issue_output(work.wg, work.out.O, work.P, v.stage, work.accumulate);
  pingpong_signal(work.wg);
  work.accumulate = true;
  ++work.wg.num_blocks;
  const auto draw = math.draw(work.wg.args, tile, block * S::block_kv);
  ptx::wgmma_wait<1>();  // the scores are ready; P V may still run
  ptx::wgmma_pin(work.scores);
  if constexpr (S::holds_queries) ptx::wgmma_pin(work.queries);
  release(work.wg, work.wg.shared.K_empty[k.stage]);
  // An interior block reads its biases one by one, unless the fixed order adds them to the scores first.
  take_biases(work.wg, math, work.wg.num_blocks - 1, block * S::block_kv, S::ordered || kind != Visit::interior);
  const bool raised = softmax(block, rescale);
  release_biases(work.wg, work.wg.num_blocks - 1);
  load_biases(math, following);
  math.drop(work.scores, draw);
  ptx::wgmma_wait<0>();  // P V is done: O and P may be read and written again
  ptx::wgmma_pin(work.out.O);
  ptx::wgmma_pin(work.P);
  release(work.wg, work.wg.shared.V_empty[v.stage]);
  if constexpr (!S::ordered) {
    if (raised) take_output(block, rescale);
  }
  math.pack(work.scores, work.P);
  ptx::wgmma_pin(work.P);
  if constexpr (S::ordered && kind == Visit::edge) take_output(block, rescale);  // the scores' registers are free
  if constexpr (kind == Visit::listed) clear_hidden_rows(work.wg, k, math.score.sight.visible_kv - block * S::block_kv);
}

template <Visit kind, class W, class Softmax>
__device__ __forceinline__ void next_block(TileWork<W>& work, const Tile& tile, const ScoreMath<W::config>& math, int block,
                                           const NextBlocks& following, const Softmax& softmax) {
  next_block<kind>(work, tile, math, block, following, softmax,
                   [&](int, const float(&rescale)[2]) { rescale_output(work.out.O, rescale); });
}

/// O += P V of the last block.
template <class W>
__device__ __forceinline__ void last_output(TileWork<W>& work, const ScoreMath<W::config>& math, int block) {
  using S = typename W::S;
  const PipelineState<S::stages> v(work.wg.num_blocks - 1);
  ptx::mbarrier_wait(work.wg.shared.V_full[v.stage], v.phase);  // V has landed
  if constexpr ((S::forwards && !S::listed) || S::from_diagonal)
    clear_hidden_rows(work.wg, v, math.score.sight.visible_kv - block * S::block_kv);
  pingpong_wait(work.wg);
  issue_output(work.wg, work.out.O, work.P, v.stage, work.accumulate);
  pingpong_signal(work.wg);
  ptx::wgmma_wait<0>();  // O is complete
  ptx::wgmma_pin(work.out.O);
  release(work.wg, work.wg.shared.V_empty[v.stage]);
}

/// A block that is not the first of the tile, by its kind.
template <Visit kind, class W>
__device__ __forceinline__ void visit(TileWork<W>& work, const Tile& tile, const ScoreMath<W::config>& math, int block,
                                      const NextBlocks& following) {
  using S = typename W::S;
  next_block<kind>(work, tile, math, block, following, [&](int block, float(&rescale)[2]) {
    if constexpr (kind == Visit::edge) {
      ptx::path<"forward/sm90 edge block">();
      softmax_edge(work.wg, math, block, work.scores, work.out.rows, work.out.statistics, rescale);
      return true;
    } else if constexpr (kind == Visit::interior) {
      ptx::path<"forward/sm90 inner block">();
      if constexpr (S::ordered) {
        math.modify(work.scores, block * S::block_kv);
        math.keep_in_order(work.scores, work.out.rows.max, work.out.rows.sum);
        return false;
      }
      math.probability_of(work.scores, block * S::block_kv, work.out.rows.max, work.out.rows.sum, work.out.statistics);
      return false;
    } else {
      ptx::path<"forward/sm90 late edge block">();
      math.template modify_and_mask<!S::forwards && !S::from_diagonal>(work.scores, block * S::block_kv);
      if constexpr (S::ordered) {
        math.keep_in_order(work.scores, work.out.rows.max, work.out.rows.sum);
        return false;
      }
      math.exponentiate(work.scores, work.out.rows.max, work.out.rows.sum, work.out.statistics);
      return false;
    }
  });
}

template <ForwardConfig config>
__device__ __forceinline__ NextBlocks after(const Tile& tile, const Blocks& seen, int n) {
  constexpr int distance = 4;  // blocks ahead, so that a bias arrives in L2 in time
  return {n + 1 < seen.end ? block_at<config>(tile, n + 1) : no_block,
          n + distance < seen.end ? block_at<config>(tile, n + distance) : no_block};
}

/// The loop over a tile whose blocks are a range, in Attempt::fixed_max or Attempt::online_max.
template <class W>
__device__ __forceinline__ void attend_range(TileWork<W>& work, const Tile& tile, const Blocks& seen,
                                             const ScoreMath<W::config>& math) {
  using S = typename W::S;
  constexpr ForwardConfig config = W::config;
  skip_blocks(work.wg, seen.begin);
  first_block(work, tile, math, block_at<config>(tile, seen.begin), after<config>(tile, seen, seen.begin),
              [&](int block, float(&rescale)[2]) {
                softmax_edge(work.wg, math, block, work.scores, work.out.rows, work.out.statistics, rescale);
              });
  int n = seen.begin + 1;
  // With a mask tensor, and in Attempt::online_max, all blocks are edge blocks: the interior is empty.
#pragma unroll 1
  for (; n < seen.interior_begin; ++n)
    visit<Visit::edge>(work, tile, math, block_at<config>(tile, n), after<config>(tile, seen, n));
  if constexpr (!config.features.mask) {
#pragma unroll 1
    for (; n < seen.interior_end; ++n)
      visit<Visit::interior>(work, tile, math, block_at<config>(tile, n), after<config>(tile, seen, n));
  }
  if constexpr (!config.features.mask && (S::forwards || S::left_edge || S::from_diagonal)) {
#pragma unroll 1
    for (; n < seen.end; ++n)
      visit<Visit::late_edge>(work, tile, math, block_at<config>(tile, n), after<config>(tile, seen, n));
  }
  release_queries(work.wg);
  last_output(work, math, block_at<config>(tile, seen.end - 1));
  skip_blocks(work.wg, tile.blocks - seen.end);
}

}  // namespace flash_attention::forward_sm90
