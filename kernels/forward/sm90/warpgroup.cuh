#pragma once

// A consumer warpgroup of forward/sm90 and forward/sm90_fp8: its current tile, its place in the block and in the rings of
// stages, and its ping-pong barriers.

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

template <ForwardConfig config, typename S, typename Storage>
struct WarpgroupBase {
  const AttentionArgs& args;
  Storage& shared;
  const int warpgroup;
  const int thread;         // in the warpgroup
  int num_tiles = 0;        // finished so far
  unsigned num_blocks = 0;  // K blocks whose scores have been computed; V follows one behind

  /// What all lanes of a warp agree on. Without uniform_by_vote (Shape) a shuffle tells the compiler so: loops over blocks
  /// count in uniform registers only then, and wgmma takes its descriptors from those.
  __device__ __forceinline__ static int uniform(int x) { return S::uniform_by_vote ? x : ptx::shuffle(x, 0); }

  /// The current tile. It is read from shared memory when it is needed, and neither it nor its address is kept in
  /// registers.
  __device__ __forceinline__ const Tile& stored_tile() const {
    return shared.tiles[ptx::registers_fresh(num_tiles) % tile_stages];
  }
  /// The same, with what loops and branches depend on known to be uniform.
  __device__ __forceinline__ Tile tile() const {
    constexpr Features features = config.features;
    Tile tile = stored_tile();
    tile.first = uniform(tile.first);
    tile.blocks = uniform(tile.blocks);
    if constexpr (!(features.packed || features.seqused_q || features.seqused_kv || features.key_lengths ||
                    features.left_padding)) {
      tile.sequence = tile::make_sequence<features>(args, tile.sequence.batch_idx);  // all but this is constant
    }
    return tile;
  }
  /// The blocks of it that this warpgroup visits.
  __device__ __forceinline__ Blocks blocks() const {
    const Blocks& seen = stored_tile().seen[S::row_group(warpgroup)];
    return {.begin = uniform(seen.begin),
            .interior_begin = uniform(seen.interior_begin),
            .interior_end = uniform(seen.interior_end),
            .end = uniform(seen.end)};
  }
  __device__ __forceinline__ Work work() const { return static_cast<Work>(uniform(static_cast<int>(stored_tile().work))); }
  __device__ __forceinline__ Attempt attempt() const {
    return static_cast<Attempt>(uniform(static_cast<int>(stored_tile().attempt)));
  }
  __device__ __forceinline__ bool visited_interior() const {
    const Blocks& seen = stored_tile().seen[S::row_group(warpgroup)];
    return seen.interior_begin < seen.interior_end;
  }
  __device__ __forceinline__ PipelineState<S::q_stages> q_state() const { return PipelineState<S::q_stages>(num_tiles); }

  __device__ __forceinline__ ScoreMath<config> scores_of(const Tile& tile) const {
    const int t = ptx::registers_fresh(thread);
    return {args, tile, tile.q_begin + S::row_group(warpgroup) * wg_rows + t / 32 * 16, t % 32};
  }

  /// All threads of the warpgroup meet.
  __device__ __forceinline__ void sync() const { ptx::barrier_sync(barrier_warpgroup + warpgroup, wg_threads); }

  /// The products that read a stage are complete: the producer warp may fill it again.
  __device__ __forceinline__ void release(ptx::Mbarrier& free) const {
    if (thread == 0) ptx::mbarrier_arrive(free);
  }
  /// Q has been read.
  __device__ __forceinline__ void release_queries() const {
    release(shared.Q_empty[q_state().stage][S::row_group(warpgroup)]);
  }

  // -- ping-pong --------------------------------------------------------------------------------------------------------

  /// Waits until the warpgroup before this one has issued its products. One alone has no barrier.
  __device__ __forceinline__ void pingpong_wait() const {
    if constexpr (S::pingpong) ptx::barrier_sync(barrier_pingpong + warpgroup, 2 * wg_threads);
  }
  /// The ping-pong barrier makes the whole warpgroup meet; without ping-pong, this one does.
  __device__ __forceinline__ void sync_without_pingpong() const {
    if constexpr (!S::pingpong) sync();
  }
  __device__ __forceinline__ void pingpong_signal() const {
    const int next = warpgroup + 1 == S::warpgroups ? 0 : warpgroup + 1;
    if constexpr (S::pingpong) ptx::barrier_arrive(barrier_pingpong + next, 2 * wg_threads);
  }
  /// Warpgroup 0 issues first. After the last tile it waits once more, so that no arrival is left over.
  __device__ __forceinline__ void pingpong_begin() const {
    if (warpgroup == S::warpgroups - 1) pingpong_signal();
  }
  __device__ __forceinline__ void pingpong_end() const {
    if (warpgroup == 0) pingpong_wait();
  }
};

// A consumer warpgroup of forward/sm90: its two products, S = Q K^T and O += P V, and the softmax of an edge block.

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

// Blocks that only other warpgroups see.

/// One block. The ping-pong goes on: issue() is called in the warpgroup's turn. V is loaded after K, but copies land in any
/// order: a stage that is freed while its K is still in flight lets the next wait for that stage return at once.
template <ForwardConfig config, typename Issue>
__device__ __forceinline__ void skip_block(Warpgroup<config>& wg, const Issue& issue) {
  using S = Shape<config>;
  ptx::path<"forward/sm90 skipped block">();
  const PipelineState<S::stages> kv(wg.num_blocks++);
  ptx::mbarrier_wait(wg.shared.K_full[kv.stage], kv.phase);
  ptx::mbarrier_wait(wg.shared.V_full[kv.stage], kv.phase);
  wg.sync_without_pingpong();  // no warp has missed a phase, and all know which block it was
  wg.pingpong_wait();
  issue();
  wg.pingpong_signal();
  wg.release(wg.shared.K_empty[kv.stage]);
  wg.release(wg.shared.V_empty[kv.stage]);
  if constexpr (S::bias_stages > 0) {
    const PipelineState<S::bias_stages> bias(wg.num_blocks - 1);
    if (has_bias_boxes(wg.args)) ptx::mbarrier_wait(wg.shared.bias_full[bias.stage][wg.warpgroup], bias.phase);
    release_biases(wg, wg.num_blocks - 1);
  }
}

template <ForwardConfig config>
__device__ __forceinline__ void skip_blocks(Warpgroup<config>& wg, int blocks) {
#pragma unroll 1
  for (; blocks > 0; --blocks) skip_block(wg, [] {});
}

}  // namespace flash_attention::forward_sm90
