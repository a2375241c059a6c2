#pragma once

// A consumer warpgroup of forward/sm90: its state, its barriers, its two products, and the softmax of an edge block. The
// loops over a tile's blocks are built from these functions: kv_loop.cuh, listed_loop.cuh, wide_loop.cuh,
// nonfinite_loop.cuh.
//
// A function with a parameter `class W` also serves the warpgroups of forward/sm90_fp8. W provides the configuration, the
// Shape, and the fields args, shared, warpgroup, thread, num_tiles and num_blocks.

#include "forward/sm90/bias_tiles.cuh"
#include "forward/sm90/mask.cuh"
#include "forward/sm90/softmax.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/matrix.cuh"
#include "ptx/memory.cuh"
#include "ptx/path.cuh"
#include "ptx/registers.cuh"
#include "tile/descriptor.cuh"
#include "tile/softmax.cuh"

namespace flash_attention::forward_sm90 {

using tile::RowState;

/// Progress of a warpgroup of wide heads. Both warpgroups use shared stages and buffers in the same order, so counters are
/// enough to know which one is next.
template <int stages>
struct WidePlace {
  PipelineState<stages> next{0};  // the next stage of K or V
  int oldest = 0;                 // the first stage that is not released yet
  unsigned num_published = 0;     // blocks of P
  unsigned num_tiles = 0;         // tiles that had blocks
  unsigned num_exchanges = 0;     // of row statistics
};

template <ForwardConfig its_config>
struct Warpgroup {
  static constexpr ForwardConfig config = its_config;
  using S = Shape<config>;
  using ScoreTile = typename ScoreMath<config>::Tile;                 // S of a block, then its probabilities
  using PackedTile = typename ScoreMath<config>::Packed;              // P as the A operand
  using QueryTile = unsigned[S::holds_queries ? S::steps_qk : 1][4];  // Q as the A operand, if it is in registers
  using OutputTile = float[S::width_v / 2];
  using SeenBlock = forward_sm90::SeenBlock<S::keeps_tested>;
  // Descriptors belong in uniform registers. If no vote tells the compiler that lanes agree, a shuffle does.
  using Descriptor = tile::Descriptor<!S::uniform_by_vote>;

  const AttentionArgs& args;
  SharedStorage<config>& shared;
  const int warpgroup;
  const int thread;         // in the warpgroup
  int num_tiles = 0;        // finished so far
  unsigned num_blocks = 0;  // K blocks whose scores have been computed; V follows one behind

  WidePlace<S::stages> place{};  // wide heads, instead of num_blocks
  unsigned num_words = 0;        // blocks whose mask bits were read
  WordPair words[2];             // precomputed mask bits of the block whose scores are being computed, or of lists
};

/// The sums of 64 query rows: O, row maxima and row sums. The layout over the warpgroup's threads is in ptx/wgmma.cuh.
template <ForwardConfig config>
struct Output {
  typename Warpgroup<config>::OutputTile O;
  RowState rows;
  typename ScoreMath<config>::Statistics statistics;
};

// -- the current tile of a warpgroup ------------------------------------------------------------------------------------

/// A value that is equal in all lanes of a warp. Unless votes already tell the compiler (uniform_by_vote), a shuffle does.
/// Only then do loops over blocks count in uniform registers, from which wgmma takes its descriptors.
template <class W>
__device__ __forceinline__ int uniform(int x) {
  return W::S::uniform_by_vote ? x : ptx::shuffle(x, 0);
}

/// The current tile, read from shared memory each time. Neither it nor its address stays in registers.
template <class W>
__device__ __forceinline__ const Tile& stored_tile(const W& wg) {
  return wg.shared.tiles[ptx::hide_from_compiler(wg.num_tiles) % tile_stages];
}
/// The same, with the fields on which loops and branches depend made uniform.
template <class W>
__device__ __forceinline__ Tile tile_of(const W& wg) {
  constexpr Features features = W::config.features;
  Tile tile = stored_tile(wg);
  tile.first = uniform<W>(tile.first);
  tile.blocks = uniform<W>(tile.blocks);
  if constexpr (!(features.packed || features.seqused_q || features.seqused_kv || features.key_lengths ||
                  features.left_padding)) {
    tile.sequence = tile::make_sequence<features>(wg.args, tile.sequence.batch_idx);  // only batch_idx varies
  }
  return tile;
}
/// The KV blocks of the current tile that this warpgroup visits.
template <class W>
__device__ __forceinline__ Blocks blocks_of(const W& wg) {
  const Blocks& seen = stored_tile(wg).seen[W::S::row_group(wg.warpgroup)];
  return {.begin = uniform<W>(seen.begin),
          .interior_begin = uniform<W>(seen.interior_begin),
          .interior_end = uniform<W>(seen.interior_end),
          .end = uniform<W>(seen.end)};
}
template <class W>
__device__ __forceinline__ Work work_of(const W& wg) {
  return static_cast<Work>(uniform<W>(static_cast<int>(stored_tile(wg).work)));
}
template <class W>
__device__ __forceinline__ Attempt attempt_of(const W& wg) {
  return static_cast<Attempt>(uniform<W>(static_cast<int>(stored_tile(wg).attempt)));
}
template <class W>
__device__ __forceinline__ bool sees_interior(const W& wg) {
  const Blocks& seen = stored_tile(wg).seen[W::S::row_group(wg.warpgroup)];
  return seen.interior_begin < seen.interior_end;
}
template <class W>
__device__ __forceinline__ PipelineState<W::S::q_stages> q_state(const W& wg) {
  return PipelineState<W::S::q_stages>(wg.num_tiles);
}
template <class W>
__device__ __forceinline__ ScoreMath<W::config> score_math(const W& wg, const Tile& tile) {
  const int t = ptx::hide_from_compiler(wg.thread);
  return {wg.args, tile, tile.q_begin + W::S::row_group(wg.warpgroup) * wg_rows + t / 32 * 16, t % 32};
}
/// If masks choose the blocks: which one is in a stage. Read before its scores are issued; afterwards it may be
/// overwritten.
template <class W>
__device__ __forceinline__ typename W::SeenBlock listed_block(const W& wg, int k_stage) {
  return W::SeenBlock::of(uniform<W>(wg.shared.listed[k_stage]), W::S::row_group(wg.warpgroup));
}

// -- barriers -----------------------------------------------------------------------------------------------------------

/// A barrier of the warpgroup.
template <class W>
__device__ __forceinline__ void sync(const W& wg) {
  ptx::barrier_sync(barrier_warpgroup + wg.warpgroup, wg_threads);
}
/// Releases a stage: the products that read it are complete, so the producer warp may fill it again.
template <class W>
__device__ __forceinline__ void release(const W& wg, ptx::Mbarrier& free) {
  if (wg.thread == 0) ptx::mbarrier_arrive(free);
}
/// Releases the stage of Q.
template <class W>
__device__ __forceinline__ void release_queries(const W& wg) {
  release(wg, wg.shared.Q_empty[q_state(wg).stage][W::S::row_group(wg.warpgroup)]);
}

/// Ping-pong: waits until the previous warpgroup has issued its products. A single warpgroup has no such barrier.
template <class W>
__device__ __forceinline__ void pingpong_wait(const W& wg) {
  if constexpr (W::S::pingpong) ptx::barrier_sync(barrier_pingpong + wg.warpgroup, 2 * wg_threads);
}
template <class W>
__device__ __forceinline__ void pingpong_signal(const W& wg) {
  const int next = wg.warpgroup + 1 == W::S::warpgroups ? 0 : wg.warpgroup + 1;
  if constexpr (W::S::pingpong) ptx::barrier_arrive(barrier_pingpong + next, 2 * wg_threads);
}
/// Warpgroup 0 issues first, so the last warpgroup signals at the start. At the end warpgroup 0 waits once more, because a
/// barrier must not be left with an arrival.
template <class W>
__device__ __forceinline__ void pingpong_begin(const W& wg) {
  if (wg.warpgroup == W::S::warpgroups - 1) pingpong_signal(wg);
}
template <class W>
__device__ __forceinline__ void pingpong_end(const W& wg) {
  if (wg.warpgroup == 0) pingpong_wait(wg);
}
/// The ping-pong barrier also synchronises the whole warpgroup. Without ping-pong, this barrier does.
template <class W>
__device__ __forceinline__ void sync_without_pingpong(const W& wg) {
  if constexpr (!W::S::pingpong) sync(wg);
}

/// Starts to load the precomputed mask bits of a block, or the words of lists with its bit. They arrive while its scores
/// are computed.
template <class W>
__device__ __forceinline__ void load_words(W& wg, const ScoreMath<W::config>& math, typename W::SeenBlock at) {
  using S = typename W::S;
  if constexpr (S::features.precomputed_mask_bits) {
    if (!at.masked()) return;
    ptx::path<"forward/sm90 words from memory">();
    const int row_tile = stored_tile(wg).list.row_tile;
    const auto* const own = mask::precomputed_mask_bits<S::block_q, S::block_kv>(wg.args, row_tile, at.block()) +
                            ptx::hide_from_compiler(math.row) % S::block_q;
#pragma unroll
    for (int r = 0; r < 2; ++r) wg.words[r] = ptx::load_global(word_pair<W::config>(math, own + 8 * r));
  }
  if constexpr (S::list_bits) {
    if (!at.masked()) return;
    ptx::path<"mask/list_map bits read by forward/sm90">();
    const int row = ptx::hide_from_compiler(math.row), last_row = math.score.sight.len_q - 1;
#pragma unroll
    for (int r = 0; r < 2; ++r)
      wg.words[r][0] = ptx::load_global(math.score.sight.data.list.row(tile::min(row + 8 * r, last_row)) + at.block() / 32);
  }
}

// -- products -----------------------------------------------------------------------------------------------------------

/// Loads Q to registers: the 16 rows of each warp, 16 columns a step.
template <class W>
__device__ __forceinline__ void load_queries(const W& wg, typename W::QueryTile& queries) {
  using S = typename W::S;
  if constexpr (S::holds_queries) {
    const auto t = static_cast<unsigned>(ptx::hide_from_compiler(wg.thread));
    const unsigned row = t / 32 * 16 + t % 16;
#pragma unroll
    for (int step = 0; step < S::steps_qk; ++step) {
      const unsigned piece = (step % 4 * 2 + t / 16 % 2) ^ row % 8;
      ptx::ldmatrix_x4(queries[step], ptx::shared_address(wg.shared.Q[q_state(wg).stage][wg.warpgroup][step / 4]) +
                                          row * 128 + piece * 16);
    }
  }
}

/// Issues scores = Q K^T.
template <class W>
__device__ __forceinline__ void issue_scores(const W& wg, typename W::ScoreTile& scores,
                                             const typename W::QueryTile& queries, int k_stage) {
  using S = typename W::S;
  using Descriptor = typename W::Descriptor;
  const int owner = S::ordered && !S::holds_queries ? ptx::hide_from_compiler(wg.warpgroup) : wg.warpgroup;
  const Descriptor Q(ptx::wgmma_descriptor(wg.shared.Q[q_state(wg).stage][owner], 0, 1024));
  const Descriptor K(ptx::wgmma_descriptor(wg.shared.K[k_stage], 0, 1024));
  ptx::wgmma_fence();  // orders the softmax's accesses to these registers before the product's
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
template <class W>
__device__ __forceinline__ void issue_output(const W& wg, typename W::OutputTile& O, const typename W::PackedTile& P,
                                             int v_stage, bool accumulate) {
  using S = typename W::S;
  const typename W::Descriptor V(ptx::wgmma_descriptor(wg.shared.V[v_stage], S::block_kv * 128, 1024));
  ptx::wgmma_fence();  // ordinary instructions have written O and P
#pragma unroll
  for (int step = 0; step < S::steps_pv; ++step) {
    ptx::wgmma_rs<S::type, S::width_v, ptx::Major::mn>(O, P[step], V.at(step * 16 * 128), accumulate || step != 0);
  }
  ptx::wgmma_commit();
}

// -- softmax ------------------------------------------------------------------------------------------------------------

/// Sets the scores of rows that do not list a block to -inf, and those that a length or a window hides.
template <class W>
__device__ __forceinline__ void hide_unlisted(const W& wg, const ScoreMath<W::config>& math, typename W::ScoreTile& scores,
                                              typename W::SeenBlock at) {
  if (at.at_edge()) math.template modify_and_mask<false, false>(scores, at.block() * W::S::block_kv);
  if (!at.masked()) return;
  const bool lists[2] = {(wg.words[0][0] >> at.block() % 32 & 1) != 0, (wg.words[1][0] >> at.block() % 32 & 1) != 0};
#pragma unroll
  for (int i = 0; i < ScoreMath<W::config>::count; ++i)
    scores[i] = lists[ScoreMath<W::config>::row_of(i)] ? scores[i] : -tile::infinity;
}

/// Sets the scores of a tested block to -inf that a mask, a length or a window hides.
template <class W>
__device__ __forceinline__ void hide_tested(W& wg, const ScoreMath<W::config>& math, typename W::ScoreTile& scores,
                                            typename W::SeenBlock at) {
  using S = typename W::S;
  constexpr ForwardConfig config = W::config;
  if constexpr (S::list_bits) return hide_unlisted(wg, math, scores, at);
  unsigned visible[2] = {0xffffffffu, 0xffffffffu};
  if constexpr (!S::makes_words) {
    if (at.masked()) take_bits<config>(math, wg.words, visible);
  } else if (at.masked()) {
    ptx::mbarrier_wait(wg.shared.mask.full[wg.warpgroup], static_cast<int>(wg.num_words++ & 1));  // the bits are written
    read_words<config>(math, wg.shared.mask.words[wg.warpgroup], visible);
    __syncwarp();  // all lanes have read
    if (ptx::hide_from_compiler(wg.thread) % 32 == 0) ptx::mbarrier_arrive(wg.shared.mask.empty[wg.warpgroup]);
  }
  hide_unseen<config>(math, scores, at.block() * S::block_kv, at.at_edge(), visible);
}

/// The softmax of an edge block: tests each score if any of the block may be hidden, and raises the maximum. The caller
/// then multiplies O by `rescale`.
template <class W>
__device__ __forceinline__ void softmax_edge(W& wg, const ScoreMath<W::config>& math, int block,
                                             typename W::ScoreTile& scores, RowState& rows,
                                             typename ScoreMath<W::config>::Statistics& statistics, float (&rescale)[2],
                                             typename W::SeenBlock at = {}) {
  using S = typename W::S;
  constexpr ForwardConfig config = W::config;
  const bool tested = at.tested();  // if masks choose the blocks
  const int wg_begin = ptx::hide_from_compiler(math.row) / wg_rows * wg_rows;
  if constexpr (S::mask_words || S::list_bits) {
    math.modify(scores, block * S::block_kv);
    if (tested) hide_tested(wg, math, scores, at);
  } else if constexpr (modifies_first<config.features>) {
    modify_then_hide(math, scores, block * S::block_kv, [&] {
      return S::listed ? !tested
                       : math.score.sight.template all_visible<wg_rows, S::block_kv>(wg_begin, block * S::block_kv);
    });
  } else if (S::listed ? !tested
                       : math.score.sight.template all_visible<wg_rows, S::block_kv>(wg_begin, block * S::block_kv)) {
    math.modify(scores, block * S::block_kv);
  } else {
    math.modify_and_mask(scores, block * S::block_kv);
    if constexpr (tile::MaskData<config.features>::present) hide_pairs(math, scores, block * S::block_kv);
  }
  if constexpr (S::ordered) return math.take_in_order(scores, rows.max, rows.sum, rescale);
  math.raise_maximum(scores, rows.max, rescale, statistics, rows.sum);
#pragma unroll
  for (int r = 0; r < 2; ++r) rows.sum[r] *= rescale[r];
  math.exponentiate_any(scores, rows.max, rows.sum, statistics);
}

template <int count>
__device__ __forceinline__ void rescale_output(float (&O)[count], const float (&rescale)[2]) {
#pragma unroll
  for (int i = 0; i < count; ++i) O[i] *= rescale[i / 2 % 2];
}

/// Zeroes the rows of V after the last visible key, in the block that contains it. They may hold NaN, and a probability of
/// 0 times NaN is NaN. Every warpgroup writes the same zeros before its products read them, so no barrier between them is
/// needed.
template <class W>
__device__ __forceinline__ void clear_hidden_rows(const W& wg, PipelineState<W::S::stages> v, int visible_rows) {
  using S = typename W::S;
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
    ptx::fence_async_shared();  // orders the zeros before the products' reads
    sync_without_pingpong(wg);  // the whole warpgroup has written; with ping-pong, its barrier follows
  }
}

// -- blocks that only other warpgroups see --------------------------------------------------------------------------------

/// Skips one block. The warpgroup still takes its turn in the ping-pong, and calls issue() in it. It waits for K and V
/// before it releases the stage: copies land in any order, and if a stage were released while its K is in flight, a phase
/// of the barrier could be missed.
template <class W, typename Issue>
__device__ __forceinline__ void skip_block(W& wg, const Issue& issue) {
  using S = typename W::S;
  ptx::path<"forward/sm90 skipped block">();
  const PipelineState<S::stages> kv(wg.num_blocks++);
  ptx::mbarrier_wait(wg.shared.K_full[kv.stage], kv.phase);
  ptx::mbarrier_wait(wg.shared.V_full[kv.stage], kv.phase);
  sync_without_pingpong(wg);  // all warps have seen this phase, and know which block it was
  pingpong_wait(wg);
  issue();
  pingpong_signal(wg);
  release(wg, wg.shared.K_empty[kv.stage]);
  release(wg, wg.shared.V_empty[kv.stage]);
  if constexpr (S::bias_stages > 0) {
    const PipelineState<S::bias_stages> bias(wg.num_blocks - 1);
    if (has_bias_boxes(wg.args)) ptx::mbarrier_wait(wg.shared.bias_full[bias.stage][wg.warpgroup], bias.phase);
    release_biases(wg, wg.num_blocks - 1);
  }
}

template <class W>
__device__ __forceinline__ void skip_blocks(W& wg, int blocks) {
#pragma unroll 1
  for (; blocks > 0; --blocks) skip_block(wg, [] {});
}

}  // namespace flash_attention::forward_sm90
