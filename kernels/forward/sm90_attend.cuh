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

#include "forward/sm90_finish.cuh"

namespace flash_attention::forward_sm90 {

template <ForwardConfig config>
struct Attender {
  using S = Shape<config>;
  using ScoreTile = typename Scores<config>::Tile;
  using PackedTile = typename Scores<config>::Packed;
  using OutputTile = float[S::width_v / 2];

  const AttentionArgs& args;
  SharedStorage<config>& shared;
  const int warpgroup;
  const int thread;         // in the warpgroup
  unsigned num_tiles = 0;   // attended so far
  unsigned num_blocks = 0;  // K blocks whose scores have been computed; V follows one behind

  // -- turns ------------------------------------------------------------------------------------------------------------

  /// Waits until the warpgroup before this one has issued its products.
  __device__ __forceinline__ void take_turn() const { ptx::barrier_sync(barrier_turn + warpgroup, 2 * wg_threads); }
  __device__ __forceinline__ void pass_turn() const {
    const int next = warpgroup + 1 == S::warpgroups ? 0 : warpgroup + 1;
    ptx::barrier_arrive(barrier_turn + next, 2 * wg_threads);
  }
  /// Before the first tile the turn is with warpgroup 0; after the last it takes it back, so that no arrival is left over.
  __device__ __forceinline__ void begin_turns() const {
    if (warpgroup == S::warpgroups - 1) pass_turn();
  }
  __device__ __forceinline__ void end_turns() const {
    if (warpgroup == 0) take_turn();
  }

  // -- products ---------------------------------------------------------------------------------------------------------

  /// Issues scores = Q K^T.
  __device__ __forceinline__ void issue_scores(ScoreTile& scores, int q_slot, int k_slot) const {
    const unsigned long long Q_desc = ptx::wgmma_descriptor(shared.Q[q_slot][warpgroup], 0, 1024);
    const unsigned long long K_desc = ptx::wgmma_descriptor(shared.K[k_slot], 0, 1024);
    ptx::wgmma_fence();  // softmax is done with these registers
#pragma unroll
    for (int step = 0; step < S::steps_qk; ++step) {
      const int chunk = step / 4, inside = step % 4 * 32;
      ptx::wgmma_ss<S::type, S::block_kv, ptx::Major::k, ptx::Major::k>(
          scores, Q_desc + (chunk * wg_rows * 128 + inside) / 16, K_desc + (chunk * S::block_kv * 128 + inside) / 16,
          step != 0);
    }
    ptx::wgmma_commit();
  }

  /// Issues O += P V, or O = P V.
  __device__ __forceinline__ void issue_output(OutputTile& O, const PackedTile& P, int v_slot, bool accumulate) const {
    const unsigned long long V_desc = ptx::wgmma_descriptor(shared.V[v_slot], S::block_kv * 128, 1024);
    ptx::wgmma_fence();  // O and P have been written by ordinary instructions
#pragma unroll
    for (int step = 0; step < S::steps_pv; ++step) {
      ptx::wgmma_rs<S::type, S::width_v, ptx::Major::mn>(O, P[step], V_desc + step * 16 * 128 / 16,
                                                         accumulate || step != 0);
    }
    ptx::wgmma_commit();
  }

  /// The products that read a slot are complete: the loading warp may fill it again.
  __device__ __forceinline__ void release(ptx::Mbarrier& free) const {
    if (thread == 0) ptx::mbarrier_arrive(free);
  }

  /// The block of V with the end of the visible keys: its other rows may hold NaN, which a probability of 0 does not
  /// silence. Every warpgroup writes the same zeros, before its own products read them.
  __device__ __forceinline__ void clear_hidden_rows(int v_slot, int visible_rows) const {
    if constexpr (S::hidden_rows) {
      if (visible_rows >= S::block_kv) return;
      const int pieces = (S::block_kv - visible_rows) * 8;  // of 16 bytes, in each chunk
      for (int i = thread; i < pieces * S::chunks_v; i += wg_threads) {
        const int chunk = i / pieces, piece = i - chunk * pieces;
        const unsigned address = ptx::shared_address(shared.V[v_slot][chunk]) + visible_rows * 128 + piece * 16;
        ptx::store_shared(address, ptx::Vector<unsigned, 4>{});
      }
      ptx::fence_async_shared();                                     // the zeros before the products' reads
      ptx::barrier_sync(barrier_warpgroup + warpgroup, wg_threads);  // those of the whole warpgroup
    }
  }

  /// For Pass::careful: what is not finite in this block of V goes to the outputs of the rows that see it, and becomes 0,
  /// so that P V leaves the other rows alone.
  __device__ __forceinline__ void take_out_nonfinite(OutputTile& O, int v_slot, int kv_begin, const Tile& tile,
                                                     const Scores<config>& math) const {
    const unsigned V_smem = ptx::shared_address(shared.V[v_slot]);
    // Each thread looks at the columns of O that it holds.
#pragma unroll 1
    for (int key = 0; key < S::block_kv; ++key) {
#pragma unroll
      for (int group = 0; group < S::width_v / 8; ++group) {
        const unsigned piece = V_smem + group / 8 * S::block_kv * 128 + key * 128 + (group % 8 ^ key % 8) * 16;
        const unsigned pair = ptx::load_shared<unsigned>(piece + 2 * math.column);
        if (!has_nonfinite(pair)) continue;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (!math.reaches_output(args, tile, math.row + 8 * r, kv_begin + key)) continue;
          const float low = ptx::unpack_low<S::type>(pair), high = ptx::unpack_high<S::type>(pair);
          O[4 * group + 2 * r] += low - low == 0.0f ? 0.0f : low;
          O[4 * group + 2 * r + 1] += high - high == 0.0f ? 0.0f : high;
        }
      }
    }
    ptx::barrier_sync(barrier_attend, S::warpgroups * wg_threads);  // all warpgroups have seen V as it came
#pragma unroll 1
    for (int i = thread; i < S::block_kv * S::chunks_v * 32; i += wg_threads) {
      const unsigned pair = ptx::load_shared<unsigned>(V_smem + 4 * i);
      if (has_nonfinite(pair)) ptx::store_shared(V_smem + 4 * i, 0u);
    }
    ptx::fence_async_shared();                                     // the zeros before the products' reads
    ptx::barrier_sync(barrier_warpgroup + warpgroup, wg_threads);  // those of the whole warpgroup
  }
  __device__ __forceinline__ static bool has_nonfinite(unsigned pair) {
    constexpr unsigned exponent = S::type == Type::float16 ? 0x7c00u : 0x7f80u;
    return (pair & exponent) == exponent || (pair >> 16 & exponent) == exponent;
  }

  // -- one tile ---------------------------------------------------------------------------------------------------------

  /// Returns whether the tile must be done again by the next pass.
  __device__ __forceinline__ bool attend(const Tile& tile, Pass pass) {
    if (!tile.exists) return false;
    const int first_row = tile.q_begin + warpgroup * wg_rows + thread / 32 * 16;
    const Scores<config> math(args, tile, first_row, thread % 32);
    OutputTile O;
    float row_max[2] = {-tile::infinity, -tile::infinity};
    float row_sum[2] = {0, 0};
    const bool empty = tile.begin == tile.end;  // no query of the tile sees a key
    if (empty || pass == Pass::careful) {
#pragma unroll
      for (float& x : O) x = 0;
    }
    if (!empty) sweep(tile, math, pass, O, row_max, row_sum);
    return Finisher<config>(args, shared, warpgroup, thread).finish(tile, math, pass, O, row_max, row_sum);
  }

  __device__ __forceinline__ void sweep(const Tile& tile, const Scores<config>& math, Pass pass, OutputTile& O,
                                        float (&row_max)[2], float (&row_sum)[2]) {
    const Turn<S::q_stages> q(num_tiles++);
    ScoreTile scores;
    PackedTile P;
    float correction[2];
    bool accumulate = pass == Pass::careful;
    int block = tile.end - 1;
    const int wg_begin = tile.q_begin + warpgroup * wg_rows;

    auto softmax_edge = [&] {
      if (math.score.template all_visible<wg_rows, S::block_kv>(wg_begin, block * S::block_kv)) {
        math.modify(scores, block * S::block_kv);
      } else {
        math.modify_and_mask(scores, block * S::block_kv);
      }
      math.raise_maximum(scores, row_max, correction);
#pragma unroll
      for (int r = 0; r < 2; ++r) row_sum[r] *= correction[r];
      math.exponentiate(scores, row_max, row_sum);
    };
    auto clean = [&](const Turn<S::stages>& v, int v_block) {
      ptx::mbarrier_wait(shared.V_full[v.slot], v.parity);  // V has landed
      take_out_nonfinite(O, v.slot, v_block * S::block_kv, tile, math);
    };
    // One block: its scores, the output of the block before, its softmax. An edge block tests every score and raises the
    // maximum. An interior block keeps the maximum as a reference: probabilities may then pass 1, which costs no
    // precision, and Finisher finds out whether they have passed what the types can hold.
    auto visit = [&]<bool edge>() {
      const Turn<S::stages> k(num_blocks), v(num_blocks - 1);
      ptx::mbarrier_wait(shared.K_full[k.slot], k.parity);  // K has landed
      if constexpr (edge) {
        if (pass == Pass::careful) clean(v, block + 1);
      }
      take_turn();
      issue_scores(scores, q.slot, k.slot);
      ptx::mbarrier_wait(shared.V_full[v.slot], v.parity);  // V of the block before has landed
      issue_output(O, P, v.slot, accumulate);
      pass_turn();
      accumulate = true;
      ++num_blocks;
      ptx::wgmma_wait<1>();  // the scores are there; P V may still run
      ptx::wgmma_pin(scores);
      release(shared.K_free[k.slot]);
      if constexpr (edge) {
        softmax_edge();
      } else {
        math.modify(scores, block * S::block_kv);
        math.exponentiate(scores, row_max, row_sum);
      }
      ptx::wgmma_wait<0>();  // P V is done: O and P are ours again
      ptx::wgmma_pin(O);
      ptx::wgmma_pin(P);
      release(shared.V_free[v.slot]);
      if constexpr (edge) {
#pragma unroll
        for (int i = 0; i < S::width_v / 2; ++i) O[i] *= correction[i / 2 % 2];
      }
      math.pack(scores, P, args, tile, block * S::block_kv);
      ptx::wgmma_pin(P);
    };

    const Turn<S::stages> last(num_blocks++);
    ptx::mbarrier_wait(shared.Q_full[q.slot][warpgroup], q.parity);  // Q has landed
    ptx::mbarrier_wait(shared.K_full[last.slot], last.parity);       // the last K has landed
    take_turn();
    issue_scores(scores, q.slot, last.slot);
    pass_turn();
    ptx::wgmma_wait<0>();  // the scores are there
    ptx::wgmma_pin(scores);
    release(shared.K_free[last.slot]);
    softmax_edge();
    math.pack(scores, P, args, tile, block * S::block_kv);
    ptx::wgmma_pin(P);
    if constexpr (S::hidden_rows) {
      ptx::mbarrier_wait(shared.V_full[last.slot], last.parity);  // V has landed, before zeros are written into it
      clear_hidden_rows(last.slot, math.score.visible_kv - block * S::block_kv);
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

    release(shared.Q_free[q.slot][warpgroup]);
    const Turn<S::stages> first(num_blocks - 1);
    ptx::mbarrier_wait(shared.V_full[first.slot], first.parity);  // the first V has landed
    if (pass == Pass::careful) clean(first, tile.begin);
    take_turn();
    issue_output(O, P, first.slot, accumulate);
    pass_turn();
    ptx::wgmma_wait<0>();  // O is complete
    ptx::wgmma_pin(O);
    release(shared.V_free[first.slot]);
  }
};

}  // namespace flash_attention::forward_sm90
