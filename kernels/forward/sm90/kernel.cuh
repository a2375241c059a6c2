#pragma once

// Attention forward for sm_90 (Hopper): TMA, wgmma, warp specialisation.
//
// A block has one producer warp and two or three consumer warpgroups (or one, and then two or three blocks share an SM). It
// stays on its SM and takes one tile after another: block_q queries of one head, 64 for each warpgroup, against all the
// keys that they see, in blocks of block_kv.
//
//     producer warp:        for each tile: Q, and block after block K and V, into rings of stages      producer.cuh
//     consumer warpgroup:   for each tile: S = Q K^T, softmax, O += P V; O / sum to memory             kv_loop.cuh
//
// If masks choose the blocks, another warp of the producer warpgroup finds the tiles and their blocks (find_tiles), or
// three of them make the words of masks (MaskWriter).
//
// Shared memory (storage.cuh): rings of Q, K and V, O before its store, and the tiles, which Q_full announces. full[stage]
// is completed by TMA, empty[stage] by one thread of every warpgroup that reads the stage. The producer warp runs ahead
// over the end of a tile: Q has two stages and O a separate buffer, so the tensor cores wait for no memory between tiles.
//
// Registers of a consumer thread: block_kv / 2 for S, half as many for P, head_dim_v / 2 for O, and 4 for each 16 columns
// of Q if it is held. forward_sm90_registers has what setmaxnreg leaves for them, ForwardLoop what is done with the rest.
//
// Softmax keeps the maximum of a row's first blocks as a reference instead of raising it with every block. A tile for
// which that was too low is found at its end (Epilogue) and marked; after the others the block does its marked tiles again,
// with the running maximum (Attempt). So the result is exact for every input, and no ordinary input pays for it.

#include "forward/sm90/epilogue.cuh"
#include "forward/sm90/kv_loop.cuh"
#include "forward/sm90/listed_loop.cuh"
#include "forward/sm90/mask.cuh"
#include "forward/sm90/nonfinite_loop.cuh"
#include "forward/sm90/producer.cuh"
#include "forward/sm90/wide_loop.cuh"
#include "ptx/launch.cuh"
#include "ptx/path.cuh"
#include "tile/tail.cuh"

namespace flash_attention {
namespace forward_sm90 {

/// Which tiles of this block the next attempt does again: a mark for each iteration, the last one for all that are left
/// over. Marks only grow, so a warpgroup that is behind misses none.
template <ForwardConfig config>
struct RetryList {
  SharedStorage<config>& shared;

  __device__ __forceinline__ void mark(const Tile& tile) const {
    const int next = static_cast<int>(tile.attempt) + 1;
    shared.retry[tile::min(tile.iteration, Shape<config>::tiles_kept - 1)] = static_cast<unsigned char>(next);
    shared.last_attempt = next;
  }
  __device__ __forceinline__ bool marked(int iteration, int attempt) const {
    const int place = tile::min(iteration, Shape<config>::tiles_kept - 1);
    if (shared.retry[place] >= attempt) return true;
    if constexpr (Shape<config>::cluster == 1) return false;
    const unsigned four = ptx::cluster_load_word(of_other(&shared.retry[place / 4 * 4]));
    return static_cast<int>(four >> place % 4 * 8 & 255) >= attempt;
  }

  /// Blocks of a cluster do a tile again that one of them has marked, since each loads for both. One thread of each, when
  /// all tiles of an attempt are done; none may end before the other has seen its marks.
  __device__ __forceinline__ void agree() const {
    if constexpr (Shape<config>::cluster > 1) {
      sync_cluster(0);  // both have marked all
      const int other = static_cast<int>(ptx::cluster_load_word(of_other(&shared.last_attempt)));
      shared.last_attempt = tile::max(shared.last_attempt, other);
      sync_cluster(1);
    }
  }

 private:
  __device__ __forceinline__ static unsigned of_other(const void* place) {
    return ptx::cluster_address(place, ptx::cluster_rank() ^ 1);
  }
  __device__ __forceinline__ void sync_cluster(int parity) const {
    ptx::cluster_mbarrier_arrive(of_other(&shared.cluster_sync));
    ptx::mbarrier_arrive(shared.cluster_sync);
    ptx::cluster_mbarrier_wait(shared.cluster_sync, parity);
  }
};

/// Fills the next tile of an attempt in, from iteration i of the block on; false: there is none.
template <ForwardConfig config>
__device__ __forceinline__ bool find_tile(const AttentionArgs& args, const RetryList<config>& retry,
                                          Schedule<config>& schedule, int& i, int attempt, Tile& tile) {
#pragma unroll 1
  while (schedule.has(i, attempt)) {
    const int iteration = i++;
    if (!retry.marked(iteration, attempt) || !schedule.tile_at(iteration, static_cast<Attempt>(attempt), tile)) continue;
    if (attempt != 0) ptx::path<"forward/sm90 repeated tile">();
    if (attempt != 0 && args.repairs != nullptr) ptx::atomic_add(args.repairs, 1);
    return true;
  }
  return false;
}

/// All tiles of all attempts and their blocks, by a warp of its own, which runs ahead of the one that loads. To claim a
/// tile, to divide, to read the map of masks and to follow its words is some 500 instructions one after another, and 100
/// more for each block of keys.
template <ForwardConfig config>
__device__ __forceinline__ void find_tiles(const AttentionArgs& args, SharedStorage<config>& shared,
                                           const RetryList<config>& retry) {
  auto& finder = shared.finder;
  Schedule<config> schedule(args, shared.claimed);
  PipelineState<FinderStorage<true>::places> place(0);
  unsigned num_tiles = 0;
#pragma unroll 1
  for (int attempt = 0; attempt <= shared.last_attempt; ++attempt) {
    bool exists = true;
#pragma unroll 1
    for (int i = 0; exists; ++num_tiles) {
      Tile& tile = shared.tiles[num_tiles % tile_stages];  // no warpgroup reads it: next_tile
      exists = find_tile(args, retry, schedule, i, attempt, tile);
      if (!exists) tile = {.attempt = static_cast<Attempt>(attempt)};
      ptx::mbarrier_arrive(finder.tile_found);
      for_listed<config>(args, tile, [&](ListedBlock described) {
        ptx::mbarrier_wait(finder.empty[place.stage], place.phase ^ 1);  // the block that was there is taken
        finder.blocks[place.stage] = described.word;
        ptx::mbarrier_arrive(finder.full[place.stage]);
        place.advance();
      });
      ptx::mbarrier_wait(finder.tile_taken, static_cast<int>(num_tiles & 1));  // if there was none: all are marked
    }
  }
}

template <ForwardConfig config>
__device__ __forceinline__ void initialise(SharedStorage<config>& shared) {
  using S = Shape<config>;
  if (threadIdx.x == 0) {
    init_bias_barriers(shared);
    if constexpr (S::finds_ahead) {
      ptx::mbarrier_init(shared.finder.tile_found, 1);
      ptx::mbarrier_init(shared.finder.tile_taken, 1);
      for (int i = 0; i < FinderStorage<true>::places; ++i) {
        ptx::mbarrier_init(shared.finder.full[i], 1);
        ptx::mbarrier_init(shared.finder.empty[i], 1);
      }
    }
    init_barriers<S>(shared);
    shared.last_attempt = 0;
  }
  for (int i = threadIdx.x; i < S::tiles_kept; i += S::threads) shared.retry[i] = 0;
  if constexpr (S::cluster > 1) {
    ptx::cluster_arrive();
    ptx::cluster_wait();  // all threads of all blocks see the barriers and marks
  } else {
    ptx::barrier_sync(barrier_all, S::threads);  // all threads see the barriers and marks
  }
}

/// One tile, from its first block to its store. Returns whether the next attempt must do it again.
template <ForwardConfig config>
__device__ __forceinline__ bool attend(Warpgroup<config>& wg, Work work) {
  Output<config> out;
  bool visited_interior = false;
  if (work == Work::write_zeros) {
    ptx::path<"forward/sm90 empty tile">();
#pragma unroll
    for (float& x : out.O) x = 0;
    ptx::barrier_sync(barrier_warpgroup + wg.warpgroup, wg_threads);  // all have seen the tile: no product made them meet
    release_queries(wg);
  } else if constexpr (Shape<config>::wide) {
    visited_interior = attend_wide(wg, out, work == Work::attend_nonfinite_safe);
  } else if (work == Work::attend_nonfinite_safe) {
    ptx::path<"forward/sm90 nonfinite-safe tile">();
    attend_nonfinite_safe(wg, out);
  } else {
    TileWork<Warpgroup<config>> tile_work{wg, out};
    const Tile tile = tile_of(wg);
    const Blocks seen = blocks_of(wg);
    const ScoreMath<config> math = score_math(wg, tile);
    load_queries(wg, tile_work.queries);
    if constexpr (Shape<config>::holds_queries) sync_without_pingpong(wg);  // all have read Q before one thread releases it
    if constexpr (Shape<config>::listed) {
      attend_listed(tile_work, tile, math);
    } else {
      attend_range(tile_work, tile, seen, math);
    }
    visited_interior = tile_work.visited_interior;
  }
  if constexpr (Shape<config>::wide) add_other_sums(wg, out.rows);
  if constexpr (!Shape<config>::listed) visited_interior = sees_interior(wg);  // the producer warp knows
  return Epilogue<config>(wg).finish(tile_of(wg), visited_interior, out);
}

}  // namespace forward_sm90

template <abi::ForwardConfig config>
__device__ __forceinline__ void forward_sm90_kernel(const abi::AttentionArgs& args) {
  using namespace forward_sm90;
  using S = Shape<config>;
  static_assert(fits_layout<config>, "the planner reserves what SharedStorage needs");
  auto& shared = ptx::shared_storage<SharedStorage<config>>();
  initialise(shared);

  const RetryList<config> retry{shared};
  const int warpgroup = ptx::shuffle(static_cast<int>(threadIdx.x) / wg_threads, 0);  // known to be the same in a warp

  if (warpgroup == 0) {
    if constexpr (S::listed) ptx::griddepcontrol_wait();  // the map of tiles is complete; all else follows from its tiles
    if (threadIdx.x >= 32) tile::clear_output_tail<config>(args, threadIdx.x - 32, wg_threads - 32);  // idle otherwise
    ptx::registers_decrease<S::load_registers>();
    if constexpr (S::makes_words) {
      const int warp = ptx::shuffle(static_cast<int>(threadIdx.x) / 32, 0);
      if (warp > 0) {
        MaskWriter<config>{args, shared, warp - 1, static_cast<int>(threadIdx.x) % 32}.run();
        return;
      }
    }
    if constexpr (S::finds_ahead) {
      if (threadIdx.x == 32) find_tiles(args, shared, retry);
      if (threadIdx.x == 0) Producer<config>{args, shared}.load_found();
      return;
    }
    if (threadIdx.x != 0) return;
    Schedule<config> schedule(args, shared.claimed);
    Producer<config> producer{args, shared};
#pragma unroll 1
    for (int attempt = 0; attempt <= shared.last_attempt; ++attempt) {
      int i = 0;
      producer.load_attempt(
          static_cast<Attempt>(attempt), [&](Tile& tile) { return find_tile(args, retry, schedule, i, attempt, tile); },
          [&] {
            if (S::claims_late && attempt == 0) schedule.claim_after(i - 1);
          });
    }
  } else {
    ptx::registers_increase<S::attend_registers>();
    if constexpr (config.features.made_words) ptx::griddepcontrol_wait();  // so are the words of the masks
    Warpgroup<config> wg{args, shared, warpgroup - 1, static_cast<int>(threadIdx.x) % wg_threads};
    pingpong_begin(wg);
#pragma unroll 1
    for (;; ++wg.num_tiles) {
      const PipelineState<S::q_stages> q = q_state(wg);
      ptx::mbarrier_wait(shared.Q_full[q.stage][S::row_group(wg.warpgroup)], q.phase);  // the next tile is ready, and its Q
      if (const Work work = work_of(wg); work != Work::none) {
        const bool unsound = attend(wg, work);
        if (S::uniform_by_vote ? ptx::any(unsound) : unsound) retry.mark(stored_tile(wg));
        continue;
      }
      const int attempt = static_cast<int>(attempt_of(wg));
      if (wg.thread == 0) ptx::bulk_wait<0>();  // stores are complete before another attempt or the end
      __syncwarp();                             // not found by the emulator: bar.sync wants the lanes of a warp together
      ptx::barrier_sync(barrier_attend, S::warpgroups * wg_threads);  // all tiles are done and marked
      if constexpr (S::cluster > 1) {
        if (wg.warpgroup == 0 && wg.thread == 0) retry.agree();
        __syncwarp();
        ptx::barrier_sync(barrier_attend, S::warpgroups * wg_threads);  // so are those of the other block
      }
      release_queries(wg);  // the producer waits for that, too
      if (ptx::shuffle(shared.last_attempt, 0) <= attempt) break;
    }
    pingpong_end(wg);
  }
}

}  // namespace flash_attention
