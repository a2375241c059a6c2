#pragma once

// The loop of a consumer warpgroup of forward/sm90 if masks choose the KV blocks of a tile (Shape::listed). The producer
// publishes with each K which block it is, which warpgroups see it, and whether it is the last. Full and tested blocks come
// in any order.
//
//     for each block, until the last:
//       not seen by this warpgroup:    O += P V of the block before, in its turn           skip_listed
//       the first that is seen:        S = Q K^T; P = softmax(S)                           begin_listed
//       another:                       S = Q K^T, O += P V of the block before; P = S      visit_listed
//     O += P V(last)                                                                       last_output

#include "forward/sm90/kv_loop.cuh"

namespace flash_attention::forward_sm90 {

/// Waits for the next block and reads which one it is.
template <class W>
__device__ __forceinline__ void find_listed(TileWork<W>& work, const ScoreMath<W::config>& math) {
  using S = typename W::S;
  const PipelineState<S::stages> k(work.wg.num_blocks);
  ptx::mbarrier_wait(work.wg.shared.K_full[k.stage], k.phase);  // K has landed
  work.at = listed_block(work.wg, k.stage);
  if (S::skips_listed && !work.at.is_seen()) return;
  math.load_bias(work.at.block() * S::block_kv);
  load_words(work.wg, math, work.at);
}

/// Processes the first block that the warpgroup sees.
template <class W>
__device__ __forceinline__ void begin_listed(TileWork<W>& work, const Tile& tile, const ScoreMath<W::config>& math) {
  using S = typename W::S;
  first_block(work, tile, math, work.at.block(), {}, [&](int block, float(&rescale)[2]) {
    softmax_edge(work.wg, math, block, work.scores, work.out.rows, work.out.statistics, rescale, work.at);
    if (S::skips_listed && work.accumulate) rescale_output(work.out.O, rescale);  // after skipped blocks
    work.visited_interior = work.visited_interior || !work.at.tested();
    work.has_output = true;
  });
}

/// A row that has seen no key uses 0 as its reference from the first full block on; a later maximum rescales it. Once all
/// rows of a warp have seen a key, tested blocks do not raise the maximum either.
template <class W>
__device__ __forceinline__ void softmax_listed(TileWork<W>& work, const ScoreMath<W::config>& math, int block,
                                               float (&rescale)[2]) {
  using S = typename W::S;
  work.raised = work.at.raises();
  if (S::keeps_tested && work.at.tested() && !work.raised)
    work.raised = ptx::any(ptx::min(work.out.rows.max[0], work.out.rows.max[1]) == -tile::infinity);
  if (work.raised) {
    ptx::path<"forward/sm90 listed edge block">();
    softmax_edge(work.wg, math, block, work.scores, work.out.rows, work.out.statistics, rescale, work.at);
  } else if (S::keeps_tested && work.at.tested()) {
    ptx::path<"forward/sm90 listed block by its reference">();
    math.modify(work.scores, block * S::block_kv);
    if constexpr (S::mask_words || S::list_bits) hide_tested(work.wg, math, work.scores, work.at);
    math.exponentiate(work.scores, work.out.rows.max, work.out.rows.sum, work.out.statistics);
  } else {
    ptx::path<"forward/sm90 listed full block">();
#pragma unroll
    for (float& maximum : work.out.rows.max) maximum = ScoreMath<W::config>::finite(maximum);
    math.probability_of(work.scores, block * S::block_kv, work.out.rows.max, work.out.rows.sum, work.out.statistics);
  }
  work.visited_interior = work.visited_interior || !work.at.tested();
}
template <class W>
__device__ __forceinline__ void visit_listed(TileWork<W>& work, const Tile& tile, const ScoreMath<W::config>& math) {
  next_block<Visit::listed>(work, tile, math, work.at.block(), {}, [&](int block, float(&rescale)[2]) {
    softmax_listed(work, math, block, rescale);
    return work.raised;
  });
}

/// A block that this warpgroup does not see. If there is an output to compute, it is issued in this block's turn. All of it
/// is in one branch; otherwise ptxas serialises all products.
template <class W>
__device__ __forceinline__ void skip_listed(TileWork<W>& work) {
  const PipelineState<W::S::stages> v(work.wg.num_blocks - 1);
  skip_block(work.wg, [&] {
    if (!work.has_output) return;
    ptx::mbarrier_wait(work.wg.shared.V_full[v.stage], v.phase);  // V of the previous block has landed
    issue_output(work.wg, work.out.O, work.P, v.stage, work.accumulate);
    ptx::wgmma_wait<0>();  // O and P may be read and written again
    ptx::wgmma_pin(work.out.O);
    release(work.wg, work.wg.shared.V_empty[v.stage]);
    work.has_output = false, work.accumulate = true;
  });
}

/// The loop over a tile whose blocks are listed, in Attempt::fixed_max or Attempt::online_max. In the ping-pong every
/// warpgroup has a turn for each block, and one for the last output.
template <class W>
__device__ __forceinline__ void attend_listed(TileWork<W>& work, const Tile& tile, const ScoreMath<W::config>& math) {
  using S = typename W::S;
  if constexpr (!S::skips_listed) {
    find_listed(work, math);
    begin_listed(work, tile, math);
#pragma unroll 1
    while (!work.at.is_last()) {
      find_listed(work, math);
      visit_listed(work, tile, math);
    }
    release_queries(work.wg);
    last_output(work, math, 0);
    return;
  }
#pragma unroll 1
  do {
    find_listed(work, math);
    if (!work.at.is_seen()) {
      skip_listed(work);
    } else if (work.has_output) {
      visit_listed(work, tile, math);
    } else {
      begin_listed(work, tile, math);
    }
  } while (!work.at.is_last());
  release_queries(work.wg);
  if (work.has_output) return last_output(work, math, 0);
  pingpong_wait(work.wg);
  pingpong_signal(work.wg);
#pragma unroll
  for (float& x : work.out.O) x = work.accumulate ? x : 0.0f;  // zeros if no block was seen
}

}  // namespace flash_attention::forward_sm90
