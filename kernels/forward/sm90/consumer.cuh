#pragma once

// A consumer warpgroup of forward/sm90: its place in the block, its ping-pong barriers, its products.

#include "forward/sm90/hide_pairs.cuh"
#include "forward/sm90/scores.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/matrix.cuh"
#include "ptx/memory.cuh"
#include "ptx/registers.cuh"

namespace flash_attention::forward_sm90 {

/// A descriptor in two words: moving its start changes the low one, without a carry. Without uniform_by_vote (Shape) the
/// low word comes by a shuffle, so that the compiler knows it for the same in all lanes and works with it in uniform
/// registers.
template <bool uniform_by_vote>
struct Descriptor {
  unsigned low;
  unsigned high;

  __device__ __forceinline__ Descriptor(const void* tile, int leading, int stride) {
    const unsigned long long whole = ptx::wgmma_descriptor(tile, leading, stride);
    low = uniform_by_vote ? static_cast<unsigned>(whole) : ptx::shuffle(static_cast<unsigned>(whole), 0);
    high = static_cast<unsigned>(whole >> 32);
  }
  /// So many bytes later.
  __device__ __forceinline__ unsigned long long at(int bytes) const {
    return static_cast<unsigned long long>(high) << 32 | (low + bytes / 16);
  }
};

/// Softmax so far, of the two rows of a thread.
struct RowState {
  float max[2] = {-tile::infinity, -tile::infinity};
  float sum[2] = {0, 0};  // this thread's part
};

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
  unsigned num_exchanges = 0;     // of row statistics
};

template <ForwardConfig config>
struct Warpgroup {
  using S = Shape<config>;
  using ScoreTile = typename ScoreMath<config>::Tile;
  using PackedTile = typename ScoreMath<config>::Packed;
  using OutputTile = typename Output<config>::Tile;
  using QueryTile = unsigned[S::holds_queries ? S::steps_qk : 1][4];  // Q as the A operand, where it is held

  const AttentionArgs& args;
  SharedStorage<config>& shared;
  const int warpgroup;
  const int thread;              // in the warpgroup
  int num_tiles = 0;             // finished so far
  unsigned num_blocks = 0;       // K blocks whose scores have been computed; V follows one behind
  WidePlace<S::stages> place{};  // wide heads, instead of num_blocks

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

  /// Which block of keys is in a stage, where masks choose; before its scores are issued, after which others may write it.
  __device__ __forceinline__ ListedBlock listed_block(int k_stage) const {
    return ListedBlock(uniform(shared.listed[k_stage]));
  }

  // -- ping-pong --------------------------------------------------------------------------------------------------------

  /// Waits until the warpgroup before this one has issued its products. One alone has no barrier.
  __device__ __forceinline__ void pingpong_wait() const {
    if constexpr (S::pingpong) ptx::barrier_sync(barrier_pingpong + warpgroup, 2 * wg_threads);
  }
  /// The ping-pong barrier makes the whole warpgroup meet; without ping-pong, this one does.
  __device__ __forceinline__ void sync_without_pingpong() const {
    if constexpr (!S::pingpong) ptx::barrier_sync(barrier_warpgroup + warpgroup, wg_threads);
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
    const Descriptor<S::uniform_by_vote> Q(shared.Q[q_state().stage][warpgroup], 0, 1024);
    const Descriptor<S::uniform_by_vote> K(shared.K[k_stage], 0, 1024);
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
    const Descriptor<S::uniform_by_vote> V(shared.V[v_stage], S::block_kv * 128, 1024);
    ptx::wgmma_fence();  // O and P have been written by ordinary instructions
#pragma unroll
    for (int step = 0; step < S::steps_pv; ++step) {
      ptx::wgmma_rs<S::type, S::width_v, ptx::Major::mn>(O, P[step], V.at(step * 16 * 128), accumulate || step != 0);
    }
    ptx::wgmma_commit();
  }

  /// The products that read a stage are complete: the loading warp may fill it again.
  __device__ __forceinline__ void release(ptx::Mbarrier& free) const {
    if (thread == 0) ptx::mbarrier_arrive(free);
  }
  /// Q has been read.
  __device__ __forceinline__ void release_queries() const {
    release(shared.Q_empty[q_state().stage][S::row_group(warpgroup)]);
  }

  // -- softmax ----------------------------------------------------------------------------------------------------------

  /// The softmax of an edge block: scores are tested where any may be hidden, and the maximum is raised. O must then be
  /// multiplied by `correction`.
  __device__ __forceinline__ void softmax_edge(const ScoreMath<config>& math, int block, ScoreTile& scores, RowState& rows,
                                               float (&correction)[2], bool tested = true) const {
    const int wg_begin = ptx::registers_fresh(math.row) / wg_rows * wg_rows;
    if constexpr (modifies_first<config.features>) {
      modify_then_hide(math, scores, block * S::block_kv, [&] {
        return S::listed ? !tested : math.score.template all_visible<wg_rows, S::block_kv>(wg_begin, block * S::block_kv);
      });
    } else if (S::listed ? !tested : math.score.template all_visible<wg_rows, S::block_kv>(wg_begin, block * S::block_kv)) {
      math.modify(scores, block * S::block_kv);
    } else {
      math.modify_and_mask(scores, block * S::block_kv);
      if constexpr (tile::MaskData<config.features>::present) hide_pairs(math, scores, block * S::block_kv);
    }
    math.raise_maximum(scores, rows.max, correction);
#pragma unroll
    for (int r = 0; r < 2; ++r) rows.sum[r] *= correction[r];
    math.exponentiate(scores, rows.max, rows.sum);
  }

  __device__ __forceinline__ static void correct(OutputTile& O, const float (&correction)[2]) {
#pragma unroll
    for (int i = 0; i < S::width_v / 2; ++i) O[i] *= correction[i / 2 % 2];
  }
};

}  // namespace flash_attention::forward_sm90
