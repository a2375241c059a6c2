#pragma once

// Attention forward for sm_90 (Hopper): TMA, wgmma, warp specialisation.
//
// A block has one loading warp and two or three warpgroups that attend (or one, and then two or three blocks share an SM).
// It stays on its SM and takes one tile after another: block_q queries (64 for each warpgroup) of one head, against all the
// keys they see, in blocks of block_kv.
//
//     loading warp:    for each tile: Q, and block after block K and V, into rings of slots      sm90_load.cuh
//     warpgroups:      for each tile: S = Q K^T, softmax, O += P V; O / sum to memory            sm90_attend.cuh
//
// The loading warp runs ahead over the end of a tile: Q has two slots and O a buffer of its own, so the tensor cores wait
// for no memory between tiles.
//
// Softmax keeps the maximum of a row's first blocks as a reference instead of raising it with every block. A tile for
// which that was too low is found at its end (Finisher) and marked; after the others the block does its marked tiles again,
// with the running maximum (Pass). So the result is exact for every input, and no ordinary input pays for it.

#include "forward/sm90_attend.cuh"
#include "forward/sm90_careful.cuh"
#include "forward/sm90_finish.cuh"
#include "forward/sm90_load.cuh"
#include "ptx/path.cuh"
#include "tile/tail.cuh"

namespace flash_attention {
namespace forward_sm90 {

/// Which tiles of this block the next pass does again: a mark for each iteration, the last one for all that are left over.
/// Marks only grow, so a warpgroup that is behind misses none.
template <ForwardConfig config>
struct Redo {
  SharedStorage<config>& shared;

  __device__ __forceinline__ void mark(const Tile& tile) const {
    const int next = static_cast<int>(tile.pass) + 1;
    shared.redo[tile::smaller(tile.iteration, max_redo_marks - 1)] = static_cast<unsigned char>(next);
    shared.last_pass = next;
  }
  __device__ __forceinline__ bool marked(int iteration, int pass) const {
    return shared.redo[tile::smaller(iteration, max_redo_marks - 1)] >= pass;
  }
};

template <ForwardConfig config>
__device__ __forceinline__ void initialise(SharedStorage<config>& shared) {
  using S = Shape<config>;
  if (threadIdx.x == 0) {
    for (int s = 0; s < S::q_stages; ++s) {
      for (int w = 0; w < S::warpgroups; ++w) {
        ptx::mbarrier_init(shared.Q_full[s][w], 1);
        ptx::mbarrier_init(shared.Q_free[s][w], 1);
      }
    }
    for (int s = 0; s < S::stages; ++s) {
      ptx::mbarrier_init(shared.K_full[s], 1);
      ptx::mbarrier_init(shared.V_full[s], 1);
      ptx::mbarrier_init(shared.K_free[s], S::warpgroups);
      ptx::mbarrier_init(shared.V_free[s], S::warpgroups);
    }
    ptx::mbarrier_init_fence();  // TMA sees the barriers
    shared.last_pass = 0;
  }
  for (int i = threadIdx.x; i < max_redo_marks; i += S::threads) shared.redo[i] = 0;
  ptx::barrier_sync(barrier_all, S::threads);  // all threads see the barriers and marks
}

/// One tile, from its first block to its store. Returns whether the next pass must do it again.
template <ForwardConfig config>
__device__ __forceinline__ bool attend(Warpgroup<config>& wg, Work work) {
  Output<config> out;
  if (work == Work::write_zeros) {
    ptx::path<"forward/sm90 empty tile">();
#pragma unroll
    for (float& x : out.O) x = 0;
    ptx::barrier_sync(barrier_warpgroup + wg.warpgroup, wg_threads);  // all have seen the tile: no product made them meet
    wg.release_queries();
  } else if (work == Work::sweep_carefully) {
    ptx::path<"forward/sm90 careful tile">();
    sweep_carefully(wg, out);
  } else {
    Sweep<config>{wg, out}.run();
  }
  return Finisher<config>(wg).finish(wg.tile(), wg.visited_interior(), out);
}

}  // namespace forward_sm90

template <abi::ForwardConfig config>
__device__ __forceinline__ void forward_sm90_kernel(const abi::AttentionArgs& args) {
  using namespace forward_sm90;
  using S = Shape<config>;
  static_assert(fits_layout<config>, "the planner reserves what SharedStorage needs");
  auto& shared = ptx::shared_storage<SharedStorage<config>>();
  initialise(shared);

  const Redo<config> redo{shared};
  const int warpgroup = ptx::shuffle(static_cast<int>(threadIdx.x) / wg_threads, 0);  // known to be the same in a warp

  if (warpgroup == 0) {
    if (threadIdx.x >= 32) tile::clear_output_tail<config>(args, threadIdx.x - 32, wg_threads - 32);  // idle otherwise
    ptx::registers_decrease<S::load_registers>();
    if (threadIdx.x != 0) return;
    Schedule<config> schedule(args, shared.taken);
    Loader<config> loader{args, shared};
#pragma unroll 1
    for (int pass = 0; pass <= shared.last_pass; ++pass) {
      int i = 0;
      loader.load_pass(static_cast<Pass>(pass), [&](Tile& tile) {
#pragma unroll 1
        while (schedule.has(i, pass)) {
          const int iteration = i++;
          if (!redo.marked(iteration, pass) || !schedule.tile_at(iteration, static_cast<Pass>(pass), tile)) continue;
          if (pass != 0) ptx::path<"forward/sm90 repeated tile">();
          if (pass != 0 && args.repairs != nullptr) ptx::atomic_add(args.repairs, 1);
          return true;
        }
        return false;
      });
    }
  } else {
    ptx::registers_increase<S::attend_registers>();
    Warpgroup<config> wg{args, shared, warpgroup - 1, static_cast<int>(threadIdx.x) % wg_threads};
    wg.begin_turns();
#pragma unroll 1
    for (;; ++wg.num_tiles) {
      const Turn<S::q_stages> q = wg.q_turn();
      ptx::mbarrier_wait(shared.Q_full[q.slot][wg.warpgroup], q.parity);  // the next tile is there, and its Q
      if (const Work work = wg.work(); work != Work::none) {
        const bool unsound = attend(wg, work);
        if (S::votes ? ptx::any(unsound) : unsound) redo.mark(wg.stored_tile());
        continue;
      }
      const int pass = static_cast<int>(wg.pass());
      if (wg.thread == 0) ptx::bulk_wait<0>();  // stores are complete before another pass or the end
      __syncwarp();                             // not found by the emulator: bar.sync wants the lanes of a warp together
      ptx::barrier_sync(barrier_attend, S::warpgroups * wg_threads);  // all tiles are done and marked
      wg.release(shared.Q_free[q.slot][wg.warpgroup]);                // the loader waits for that, too
      if (ptx::shuffle(shared.last_pass, 0) <= pass) break;
    }
    wg.end_turns();
  }
}

}  // namespace flash_attention
