#pragma once

// A consumer warpgroup of forward/sm90: its two products, S = Q K^T and O += P V, and the softmax of an edge block.

#include "forward/sm90/hide_pairs.cuh"
#include "forward/sm90/warpgroup.cuh"
#include "ptx/fence.cuh"
#include "ptx/matrix.cuh"
#include "ptx/memory.cuh"
#include "ptx/path.cuh"
#include "tile/descriptor.cuh"
#include "tile/softmax.cuh"

namespace flash_attention::forward_sm90 {

using tile::RowState;

/// What a block's softmax does:
///   edge        tests every score against the mask and raises the maximum
///   interior    tests nothing and keeps the maximum. Probabilities may exceed 1, which costs no precision; Epilogue finds
///               out whether they exceeded what the types can hold
///   late_edge   after the interior: tests every score and keeps the maximum
///   listed      if masks choose the blocks: each says whether it is an edge or interior, in any order
enum class Visit { edge, interior, late_edge, listed };

/// What softmax and P V leave behind for 64 query rows, spread over the warpgroup as ptx/wgmma.cuh says.
template <ForwardConfig config>
struct Output {
  using Tile = float[Shape<config>::width_v / 2];

  Tile O;
  RowState rows;
};

/// How far a warpgroup of wide heads is: all that it shares with the other one comes in the same order.
template <int stages>
struct WidePlace {
  PipelineState<stages> next{0};  // the stage of K or V that comes next
  int oldest = 0;                 // the first stage that was not given back
  unsigned num_published = 0;     // blocks of P
  unsigned num_tiles = 0;         // that had any
  unsigned num_exchanges = 0;     // of row statistics
};

template <ForwardConfig config>
struct Warpgroup : WarpgroupBase<config, Shape<config>, SharedStorage<config>> {
  using S = Shape<config>;
  using Base = WarpgroupBase<config, S, SharedStorage<config>>;
  using Base::shared, Base::warpgroup, Base::thread, Base::uniform, Base::q_state;
  using ScoreTile = typename ScoreMath<config>::Tile;
  using PackedTile = typename ScoreMath<config>::Packed;
  using OutputTile = typename Output<config>::Tile;
  using Descriptor = tile::Descriptor<!S::uniform_by_vote>;
  using SeenBlock = forward_sm90::SeenBlock<S::keeps_tested>;
  using QueryTile = unsigned[S::holds_queries ? S::steps_qk : 1][4];  // Q as the A operand, where it is held

  WidePlace<S::stages> place{};  // wide heads, instead of num_blocks
  unsigned num_words = 0;        // blocks whose words of a mask were read
  WordPair words[2];             // where they come from memory: of the block whose scores are computed

  /// Which block of keys is in a stage, if masks choose; before its scores are issued, after which others may write it.
  __device__ __forceinline__ SeenBlock listed_block(int k_stage) const {
    return SeenBlock::of(uniform(shared.listed[k_stage]), S::row_group(warpgroup));
  }

  /// The words of a block are on their way while its scores are computed.
  __device__ __forceinline__ void load_words(const ScoreMath<config>& math, SeenBlock at) {
    if constexpr (S::features.made_words) {
      if (!at.masked()) return;
      ptx::path<"forward/sm90 words from memory">();
      const int row_tile = this->stored_tile().list.row_tile;
      const auto* const own = mask::made_words<S::block_q, S::block_kv>(this->args, row_tile, at.block()) +
                              ptx::registers_fresh(math.row) % S::block_q;
#pragma unroll
      for (int r = 0; r < 2; ++r) words[r] = ptx::load_global(word_pair<config>(math, own + 8 * r));
    }
  }

  // -- products ---------------------------------------------------------------------------------------------------------

  /// Q to registers: 16 rows of a warp, 16 columns a step.
  __device__ __forceinline__ void load_queries(QueryTile& queries) const {
    if constexpr (S::holds_queries) {
      const auto t = static_cast<unsigned>(ptx::registers_fresh(thread));
      const unsigned row = t / 32 * 16 + t % 16;
#pragma unroll
      for (int step = 0; step < S::steps_qk; ++step) {
        const unsigned piece = (step % 4 * 2 + t / 16 % 2) ^ row % 8;
        ptx::ldmatrix_x4(queries[step],
                         ptx::shared_address(shared.Q[q_state().stage][warpgroup][step / 4]) + row * 128 + piece * 16);
      }
    }
  }

  /// Issues scores = Q K^T.
  __device__ __forceinline__ void issue_scores(ScoreTile& scores, const QueryTile& queries, int k_stage) const {
    const Descriptor Q(ptx::wgmma_descriptor(shared.Q[q_state().stage][warpgroup], 0, 1024));
    const Descriptor K(ptx::wgmma_descriptor(shared.K[k_stage], 0, 1024));
    ptx::wgmma_fence();  // softmax is done with these registers
#pragma unroll
    for (int step = 0; step < S::steps_qk; ++step) {
      const int chunk = step / 4, inside = step % 4 * 32;
      const unsigned long long k = K.at(chunk * S::block_kv * 128 + inside);
      if constexpr (S::holds_queries) {
        ptx::wgmma_rs<S::type, S::block_kv, ptx::Major::k>(scores, queries[step], k, step != 0);
      } else {
        ptx::wgmma_ss<S::type, S::block_kv, ptx::Major::k, ptx::Major::k>(scores, Q.at(chunk * wg_rows * 128 + inside), k,
                                                                          step != 0);
      }
    }
    ptx::wgmma_commit();
  }

  /// Issues O += P V, or O = P V.
  __device__ __forceinline__ void issue_output(OutputTile& O, const PackedTile& P, int v_stage, bool accumulate) const {
    const Descriptor V(ptx::wgmma_descriptor(shared.V[v_stage], S::block_kv * 128, 1024));
    ptx::wgmma_fence();  // O and P have been written by ordinary instructions
#pragma unroll
    for (int step = 0; step < S::steps_pv; ++step) {
      ptx::wgmma_rs<S::type, S::width_v, ptx::Major::mn>(O, P[step], V.at(step * 16 * 128), accumulate || step != 0);
    }
    ptx::wgmma_commit();
  }

  // -- softmax ----------------------------------------------------------------------------------------------------------

  /// The softmax of an edge block: scores are tested where any may be hidden, and the maximum is raised. O must then be
  /// multiplied by `rescale`.
  __device__ __forceinline__ void softmax_edge(const ScoreMath<config>& math, int block, ScoreTile& scores, RowState& rows,
                                               float (&rescale)[2], SeenBlock at = {}) {
    const bool tested = at.tested();  // if masks choose
    const int wg_begin = ptx::registers_fresh(math.row) / wg_rows * wg_rows;
    if constexpr (S::mask_words) {
      math.modify(scores, block * S::block_kv);
      if (tested) hide_tested(math, scores, at);
    } else if constexpr (modifies_first<config.features>) {
      modify_then_hide(math, scores, block * S::block_kv, [&] {
        return S::listed ? !tested : math.score.template all_visible<wg_rows, S::block_kv>(wg_begin, block * S::block_kv);
      });
    } else if (S::listed ? !tested : math.score.template all_visible<wg_rows, S::block_kv>(wg_begin, block * S::block_kv)) {
      math.modify(scores, block * S::block_kv);
    } else {
      math.modify_and_mask(scores, block * S::block_kv);
      if constexpr (tile::MaskData<config.features>::present) hide_pairs(math, scores, block * S::block_kv);
    }
    math.raise_maximum(scores, rows.max, rescale);
#pragma unroll
    for (int r = 0; r < 2; ++r) rows.sum[r] *= rescale[r];
    math.exponentiate_any(scores, rows.max, rows.sum);
  }

  /// What the masks, lengths and windows hide of a tested block becomes -inf.
  __device__ __forceinline__ void hide_tested(const ScoreMath<config>& math, ScoreTile& scores, SeenBlock at) {
    unsigned visible[2] = {0xffffffffu, 0xffffffffu};
    if constexpr (!S::makes_words) {
      if (at.masked()) take_bits<config>(math, words, visible);
    } else if (at.masked()) {
      ptx::mbarrier_wait(shared.mask.full[warpgroup], static_cast<int>(num_words++ & 1));  // the words are written
      read_words<config>(math, shared.mask.words[warpgroup], visible);
      __syncwarp();  // all lanes have read
      if (ptx::registers_fresh(thread) % 32 == 0) ptx::mbarrier_arrive(shared.mask.empty[warpgroup]);
    }
    hide_unseen<config>(math, scores, at.block() * S::block_kv, at.at_edge(), visible);
  }

  __device__ __forceinline__ static void rescale_output(OutputTile& O, const float (&rescale)[2]) {
#pragma unroll
    for (int i = 0; i < S::width_v / 2; ++i) O[i] *= rescale[i / 2 % 2];
  }
};

/// The block of V with the end of the visible keys: its other rows may hold NaN, which a probability of 0 does not
/// silence. Every warpgroup writes the same zeros, before its own products read them.
template <ForwardConfig config>
__device__ __forceinline__ void clear_hidden_rows(const Warpgroup<config>& wg, PipelineState<Shape<config>::stages> v,
                                                  int visible_rows) {
  using S = Shape<config>;
  if constexpr (S::hidden_rows) {
    if (visible_rows >= S::block_kv) return;
    ptx::path<"forward/sm90 hidden rows of V">();
    ptx::mbarrier_wait(wg.shared.V_full[v.stage], v.phase);  // V has landed
    const int pieces = (S::block_kv - visible_rows) * 8;     // of 16 bytes, in each chunk
    for (int i = wg.thread; i < pieces * S::chunks_v; i += wg_threads) {
      const int chunk = i / pieces, piece = i - chunk * pieces;
      const unsigned address = ptx::shared_address(wg.shared.V[v.stage][chunk]) + visible_rows * 128 + piece * 16;
      ptx::store_shared(address, ptx::Vector<unsigned, 4>{});
    }
    ptx::fence_async_shared();   // the zeros before the products' reads
    wg.sync_without_pingpong();  // those of the whole warpgroup
  }
}

}  // namespace flash_attention::forward_sm90
