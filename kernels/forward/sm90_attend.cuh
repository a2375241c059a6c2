#pragma once

// A warpgroup of forward/sm90 that attends: 64 query rows of each tile, all blocks of keys.
//
//     S = Q K(last)^T; P = softmax(S)
//     for the other blocks, from the last to the first:
//       issue S = Q K^T            then issue O += P V of the block before
//       softmax of S while P V runs; then P = S
//     O += P V(first)
//
// The warpgroups take turns to issue products (ping-pong): while one does softmax, another's products run.

#include "forward/sm90_warpgroup.cuh"

namespace flash_attention::forward_sm90 {

/// The block of V with the end of the visible keys: its other rows may hold NaN, which a probability of 0 does not
/// silence. Every warpgroup writes the same zeros, before its own products read them.
template <ForwardConfig config>
__device__ __forceinline__ void clear_hidden_rows(const Warpgroup<config>& wg, int v_slot, int visible_rows) {
  using S = Shape<config>;
  if constexpr (S::hidden_rows) {
    if (visible_rows >= S::block_kv) return;
    const int pieces = (S::block_kv - visible_rows) * 8;  // of 16 bytes, in each chunk
    for (int i = wg.thread; i < pieces * S::chunks_v; i += wg_threads) {
      const int chunk = i / pieces, piece = i - chunk * pieces;
      const unsigned address = ptx::shared_address(wg.shared.V[v_slot][chunk]) + visible_rows * 128 + piece * 16;
      ptx::store_shared(address, ptx::Vector<unsigned, 4>{});
    }
    ptx::fence_async_shared();                                        // the zeros before the products' reads
    ptx::barrier_sync(barrier_warpgroup + wg.warpgroup, wg_threads);  // those of the whole warpgroup
  }
}

/// All blocks of a tile. Pass::reference or Pass::running.
template <ForwardConfig config>
__device__ __forceinline__ void sweep(Warpgroup<config>& wg, Output<config>& out) {
  using S = Shape<config>;
  const Tile tile = wg.tile();
  const Scores<config> math = wg.scores_of(tile);
  const Turn<S::q_stages> q = wg.q_turn();
  typename Warpgroup<config>::ScoreTile scores;
  typename Warpgroup<config>::PackedTile P;
  float correction[2];
  bool accumulate = false;
  int block = tile.end - 1;

  // One block: its scores, the output of the block before, its softmax. An edge block tests every score and raises the
  // maximum. An interior block keeps the maximum as a reference: probabilities may then pass 1, which costs no
  // precision, and Finisher finds out whether they have passed what the types can hold.
  auto visit = [&]<bool edge>() {
    const Turn<S::stages> k(wg.num_blocks), v(wg.num_blocks - 1);
    ptx::mbarrier_wait(wg.shared.K_full[k.slot], k.parity);  // K has landed
    wg.take_turn();
    wg.issue_scores(scores, q.slot, k.slot);
    ptx::mbarrier_wait(wg.shared.V_full[v.slot], v.parity);  // V of the block before has landed
    wg.issue_output(out.O, P, v.slot, accumulate);
    wg.pass_turn();
    accumulate = true;
    ++wg.num_blocks;
    ptx::wgmma_wait<1>();  // the scores are there; P V may still run
    ptx::wgmma_pin(scores);
    wg.release(wg.shared.K_free[k.slot]);
    if constexpr (edge) {
      wg.softmax_edge(math, block, scores, out, correction);
    } else {
      math.modify(scores, block * S::block_kv);
      math.exponentiate(scores, out.row_max, out.row_sum);
    }
    math.drop(scores, wg.args, tile, block * S::block_kv);
    ptx::wgmma_wait<0>();  // P V is done: O and P are ours again
    ptx::wgmma_pin(out.O);
    ptx::wgmma_pin(P);
    wg.release(wg.shared.V_free[v.slot]);
    if constexpr (edge) wg.correct(out.O, correction);
    math.pack(scores, P);
    ptx::wgmma_pin(P);
  };

  const Turn<S::stages> last(wg.num_blocks++);
  ptx::mbarrier_wait(wg.shared.K_full[last.slot], last.parity);  // the last K has landed
  wg.take_turn();
  wg.issue_scores(scores, q.slot, last.slot);
  wg.pass_turn();
  ptx::wgmma_wait<0>();  // the scores are there
  ptx::wgmma_pin(scores);
  wg.release(wg.shared.K_free[last.slot]);
  wg.softmax_edge(math, block, scores, out, correction);
  math.drop(scores, wg.args, tile, block * S::block_kv);
  math.pack(scores, P);
  ptx::wgmma_pin(P);
  if constexpr (S::hidden_rows) {
    ptx::mbarrier_wait(wg.shared.V_full[last.slot], last.parity);  // V has landed, before zeros are written into it
    clear_hidden_rows(wg, last.slot, math.score.visible_kv - block * S::block_kv);
  }
  --block;

  // The right edge, the interior, the left edge; with a mask tensor all is edge.
#pragma unroll 1
  for (int side = 0; side < (config.features.window_left ? 2 : 1); ++side) {
    const int edge_begin = side == 0 ? tile.interior_end : tile.begin;
#pragma unroll 1
    for (; block >= edge_begin; --block) visit.template operator()<true>();
    if constexpr (!config.features.mask) {
#pragma unroll 1
      for (; block >= tile.interior_begin; --block) visit.template operator()<false>();
    }
  }

  wg.release(wg.shared.Q_free[q.slot][wg.warpgroup]);
  const Turn<S::stages> first(wg.num_blocks - 1);
  ptx::mbarrier_wait(wg.shared.V_full[first.slot], first.parity);  // the first V has landed
  wg.take_turn();
  wg.issue_output(out.O, P, first.slot, accumulate);
  wg.pass_turn();
  ptx::wgmma_wait<0>();  // O is complete
  ptx::wgmma_pin(out.O);
  wg.release(wg.shared.V_free[first.slot]);
}

}  // namespace flash_attention::forward_sm90
