#pragma once

// Attention forward for sm_90 (Hopper): TMA, wgmma, warp specialisation.
//
// The grid is persistent: a thread block stays on its SM and processes one tile after another. A tile is block_q queries of
// one head, with all keys that they see, in KV blocks of block_kv keys. A thread block has one producer warp and two or
// three consumer warpgroups, each with 64 queries of the tile. (If it has one, two or three thread blocks share an SM.)
//
//     producer warp, for each tile:                                                producer.cuh
//       load Q;  for each KV block: wait until a stage is empty, load K and V into it with TMA
//     consumer warpgroup, for each tile:                                           kv_loop.cuh
//       for each KV block:  S = Q K^T;  P = softmax step of S;  O += P V
//       O / sum -> shared memory -> global memory                                  epilogue.cuh
//
// If masks choose the KV blocks, the loop is listed_loop.cuh. Then another warp of the producer warpgroup finds the tiles
// and their blocks (find_tiles), or three other warps compute the mask bits (MaskWriter).
//
// Shared memory (storage.cuh): rings of stages for Q, K and V; a buffer for O; and the descriptions of the current tiles,
// which are valid when Q_full is completed. TMA completes full[stage]; one thread of each warpgroup that reads the stage
// arrives at empty[stage]. The producer runs ahead across the end of a tile. For that Q has two stages and O a separate
// buffer, so the tensor cores do not wait for memory between tiles.
//
// Registers of a consumer thread: block_kv / 2 for S, half as many for P, head_dim_v / 2 for O, and 4 for each 16 columns
// of Q if Q is held in registers. setmaxnreg moves registers from the producer to the consumers (forward_sm90_registers).
// The planner decides how the rest is used (ForwardLoop).
//
// Reference of the softmax: only the first blocks of a row raise its maximum. Later blocks use that maximum unchanged,
// which saves the reduction and the rescaling of O. If it was too low, probabilities overflow. The epilogue detects this
// and marks the tile; after its last tile the thread block repeats its marked tiles with a running maximum (Attempt). So
// the result is exact for every input, and ordinary inputs do not pay for it. In the fixed order of invariant bits
// each segment of keys has its own reference (ordered_loop.cuh).

#include "forward/sm90/epilogue.cuh"
#include "forward/sm90/kv_loop.cuh"
#include "forward/sm90/listed_loop.cuh"
#include "forward/sm90/mask.cuh"
#include "forward/sm90/nonfinite_loop.cuh"
#include "forward/sm90/ordered_loop.cuh"
#include "forward/sm90/producer.cuh"
#include "forward/sm90/wide_loop.cuh"
#include "ptx/launch.cuh"
#include "ptx/path.cuh"
#include "tile/tail.cuh"

namespace flash_attention {
namespace forward_sm90 {

/// The tiles that the next attempt must repeat: a mark for each iteration of this block; the last mark stands for all
/// further iterations. A mark is the number of the attempt and only grows, so a warpgroup that is behind cannot erase one.
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

  /// The blocks of a cluster load for each other, so both repeat a tile that one of them has marked. Called by one thread
  /// of each block when all tiles of an attempt are done. Neither may end before the other has read its marks.
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

/// Fills in the next tile of an attempt, from iteration i of the block on. Returns false if there is none.
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

/// Finds all tiles of all attempts and their KV blocks, in a separate warp that runs ahead of the loading one. To claim a
/// tile, compute its place and read the mask map takes some 500 dependent instructions, and 100 more for each KV block:
/// the loading warp would be late.
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
      Tile& tile = shared.tiles[num_tiles % tile_stages];  // no warpgroup reads it any more: next_tile
      exists = find_tile(args, retry, schedule, i, attempt, tile);
      if (!exists) tile = {.attempt = static_cast<Attempt>(attempt)};
      ptx::mbarrier_arrive(finder.tile_found);
      for_listed<config>(args, tile, [&](ListedBlock described) {
        ptx::mbarrier_wait(finder.empty[place.stage], place.phase ^ 1);  // the previous block has been taken from here
        finder.blocks[place.stage] = described.word;
        ptx::mbarrier_arrive(finder.full[place.stage]);
        place.advance();
      });
      // After the last tile of an attempt this also means: all consumers are done, and have set their marks.
      ptx::mbarrier_wait(finder.tile_taken, static_cast<int>(num_tiles & 1));
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

/// Processes one tile, from its first block to its store. Returns whether the next attempt must repeat it.
template <ForwardConfig config>
__device__ __forceinline__ bool attend(Warpgroup<config>& wg, Work work) {
  Output<config> out;
  bool visited_interior = false;
  if (work == Work::write_zeros) {
    ptx::path<"forward/sm90 empty tile">();
#pragma unroll
    for (float& x : out.O) x = 0;
    ptx::barrier_sync(barrier_warpgroup + wg.warpgroup, wg_threads);  // all have read the tile, before one releases it
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
    if constexpr (Shape<config>::holds_queries) sync_without_pingpong(wg);  // all have read Q, before one releases it
    if constexpr (Shape<config>::ordered) {
      attend_in_order(tile_work, tile, seen, math);
    } else if constexpr (Shape<config>::listed) {
      attend_listed(tile_work, tile, math);
    } else {
      attend_range(tile_work, tile, seen, math);
    }
    visited_interior = tile_work.visited_interior;
  }
  if constexpr (Shape<config>::wide) add_other_sums(wg, out.rows);
  if constexpr (!Shape<config>::listed) visited_interior = sees_interior(wg);  // the producer warp has written it
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
  const int warpgroup = ptx::shuffle(static_cast<int>(threadIdx.x) / wg_threads, 0);  // the compiler knows: uniform

  if (warpgroup == 0) {
    if constexpr (S::listed) ptx::griddepcontrol_wait();  // the map of tiles is complete; consumers wait for the tiles
    if (threadIdx.x >= 32) tile::clear_output_tail<config>(args, threadIdx.x - 32, wg_threads - 32);  // they are idle
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
    if constexpr (config.features.precomputed_mask_bits || S::list_bits || config.features.max_logit)
      ptx::griddepcontrol_wait();  // the mask bits are complete, the largest scores are -inf
    Warpgroup<config> wg{args, shared, warpgroup - 1, static_cast<int>(threadIdx.x) % wg_threads};
    pingpong_begin(wg);
#pragma unroll 1
    for (;; ++wg.num_tiles) {
      const PipelineState<S::q_stages> q = q_state(wg);
      ptx::mbarrier_wait(shared.Q_full[q.stage][S::row_group(wg.warpgroup)], q.phase);  // the next tile and its Q are ready
      if (const Work work = work_of(wg); work != Work::none) {
        const bool unsound = attend(wg, work);
        if (S::uniform_by_vote ? ptx::any(unsound) : unsound) retry.mark(stored_tile(wg));
        continue;
      }
      const int attempt = static_cast<int>(attempt_of(wg));
      // There is no further tile in this attempt.
      if (wg.thread == 0) ptx::bulk_wait<0>();  // stores are complete before another attempt or the end
      __syncwarp();                             // bar.sync needs the lanes of a warp together (the emulator does not check)
      ptx::barrier_sync(barrier_attend, S::warpgroups * wg_threads);  // all tiles are done and marked
      if constexpr (S::cluster > 1) {
        if (wg.warpgroup == 0 && wg.thread == 0) retry.agree();
        __syncwarp();
        ptx::barrier_sync(barrier_attend, S::warpgroups * wg_threads);  // the other block's marks are here, too
      }
      release_queries(wg);  // the producer waits for it before it looks for marks
      if (ptx::shuffle(shared.last_attempt, 0) <= attempt) break;
    }
    pingpong_end(wg);
  }
}

}  // namespace flash_attention
