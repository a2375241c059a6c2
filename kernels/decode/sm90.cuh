#pragma once

// Attention forward for few queries on sm_90. Items, tiles and consumer warps are those of decode/sm80; extra warps load
// the tiles with TMA. A thread block executes:
//
//   producer warps, for each tile of the run (one warp loads K, another V):
//     wait until the stage is empty;  issue the boxes
//   consumer warps, for each tile of the run:                                     consumer.cuh
//     wait for K;  S = Q K^T;  release K;  softmax step
//     wait for V;  O = O * rescale + P V;  release V
//     at the end of an item: finish                                               finish.cuh
//
// Shared memory: num_stages stages of a K tile and a V tile, each with a "full" and an "empty" mbarrier. The producer of K
// and the producer of V never wait for each other, so the products with K can begin while V is still in flight.
//
// Each consumer warp has separate keys of every tile and a separate online maximum. So consumers do not synchronise with
// each other within a tile, except to clear V; all of them meet only at the end of an item. Meanwhile the producers load
// the next item, so memory is never idle.
//
// A box is 64 columns of a tile's rows. If pages are smaller than a tile, a box has the rows of one page, and each lane
// issues the boxes of one page. Pages that no row sees are not read. A box may bring rows that no query sees, and rows
// that no box brought keep old contents: the consumers clear such rows of V (Consumer::clear_unseen_values) and hide the
// scores of such rows of K.

#include "abi/tensor_maps.h"
#include "decode/consumer.cuh"
#include "ptx/bits.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/tma.cuh"
#include "tile/pipeline.cuh"
#include "tile/tail.cuh"

namespace flash_attention {

using namespace abi;

using namespace abi::decode_sm90_maps;

template <ForwardConfig config>
struct DecodeSm90 {
  using Consumer = decode::Consumer<config>;
  using KTile = typename Consumer::KTile;
  using VTile = typename Consumer::VTile;
  static constexpr Features features = config.features;
  static constexpr int stages = config.num_stages, block_kv = config.block_kv;
  // The planner computes the same number, for a device with the shared memory of sm_90.
  static constexpr DecodeRegisters registers{config, decode_blocks_per_sm(config, 227 << 10)};
  static_assert(config.producer_warp && !features.token_scales);

  using SharedStorage = typename Consumer::SharedStorage;

  const AttentionArgs& args;
  SharedStorage& storage;
  typename SharedStorage::Barriers& barriers = storage.barriers;

  /// How a consumer warp waits for a stage and releases it.
  struct Gate {
    typename SharedStorage::Barriers& barriers;
    tile::PipelineState<stages> kv;

    __device__ __forceinline__ void K_ready() const { ptx::mbarrier_wait(barriers.K_full[kv.stage], kv.phase); }
    __device__ __forceinline__ void V_ready() const { ptx::mbarrier_wait(barriers.V_full[kv.stage], kv.phase); }
    __device__ __forceinline__ void K_read() const { arrive(barriers.K_empty[kv.stage]); }
    __device__ __forceinline__ void V_read() const { arrive(barriers.V_empty[kv.stage]); }

    __device__ __forceinline__ static void arrive(ptx::Mbarrier& barrier) {
      __syncwarp();  // every lane has read: the one arrival is for all of them
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
    }
  };

  // Producers: one warp for K and one for V. Small pages mean many boxes, so paged calls have two warps for each.
  static constexpr int producer_warps = decode_producer_threads / 32, sharers = features.paged ? producer_warps / 2 : 1;
  // Named barriers: one for all warps, one for the producers of K, one for those of V.
  static constexpr int barrier_ready = 2, barrier_sharers = 3, all_threads = 32 * (config.num_warps + 2 * sharers);

  /// One producer warp: all of K or V, or every other page of it.
  struct Producer {
    const AttentionArgs& args;
    const TensorMap& map;
    ptx::Mbarrier* full;
    ptx::Mbarrier* empty;
    unsigned char* stage;  // the first
    int panels;
    int panel_bytes;
    int sharer;
    int lane = threadIdx.x % 32;
    int rows = features.paged ? tile::min(args.page_size, block_kv) : block_kv;  // of a box
    int box = lane * sharers + sharer;                                           // that this lane issues, in the tile

    /// If all keys are read only once, they are marked to leave L2 first. So the data that other kernels left in L2 stays,
    /// and L2 does not write it back while the keys are read.
    __device__ __forceinline__ void load_box(unsigned char* to, ptx::Mbarrier& barrier, int x0, int x1, int x2,
                                             int x3) const {
      if constexpr (config.read_once) {
        ptx::tma_load_policy_4d(to, map, barrier, ptx::l2_evict_first(), x0, x1, x2, x3);
      } else {
        ptx::tma_load_4d(to, map, barrier, x0, x1, x2, x3);
      }
    }

    /// Issues the boxes of a tile. `page`: of this lane's box; -1 if no query sees the box.
    __device__ __forceinline__ void load(int n, const decode::Item<config>& item, int tile_idx, int page) const {
      const tile::PipelineState<stages> kv(static_cast<unsigned>(n));
      if constexpr (config.tiles_in_flight > 0) {  // fewer tiles in flight than there are stages
        const int before = n - config.tiles_in_flight;
        const tile::PipelineState<stages> arrived(static_cast<unsigned>(tile::max(0, before)));
        if (before >= 0) ptx::mbarrier_wait(full[arrived.stage], arrived.phase);
      }
      ptx::mbarrier_wait(empty[kv.stage], kv.phase ^ 1);  // stages begin empty: phase 1 counts as completed
      __syncwarp();  // every lane has seen this phase, before the boxes let the barrier go on to the next one
      unsigned char* to = stage + kv.stage * sizeof(typename SharedStorage::Stage);
      ptx::Mbarrier& barrier = full[kv.stage];
      if constexpr (features.paged) {
        const int boxes = ptx::count_ones(ptx::ballot(page >= 0));
        if (lane == 0) ptx::mbarrier_arrive_expect_tx(barrier, boxes * rows * 128 * panels);
        __syncwarp();  // the barrier expects the bytes before the first box can arrive
        if (page < 0) return;
        const int first = rows == block_kv ? tile_idx * block_kv % args.page_size : 0;
#pragma unroll 1
        for (int panel = 0; panel < panels; ++panel)
          load_box(to + panel * panel_bytes + box * rows * 128, barrier, panel * 64, first, item.kv_head_idx, page);
      } else if (lane == 0) {
        const int start = features.packed ? args.cu_seqlens_kv[item.batch_idx] : 0;
        ptx::mbarrier_arrive_expect_tx(barrier, panel_bytes * panels);
#pragma unroll 1
        for (int panel = 0; panel < panels; ++panel)
          load_box(to + panel * panel_bytes, barrier, panel * 64, start + tile_idx * block_kv, item.kv_head_idx,
                   features.packed ? 0 : item.batch_idx);
      }
    }

    /// The page of this lane's box of a tile; -1 if no query sees any row of the box.
    __device__ __forceinline__ int look_up(const decode::Cursor<config>& place) const {
      if constexpr (!features.paged) return 0;
      const decode::Item<config>& item = place.item;
      const int begin = place.tile * block_kv + box * rows;
      if (box * rows >= block_kv || begin >= item.seen.end || begin + rows <= item.seen.begin) return -1;
      const int entry = args.page_table[item.batch_idx * args.page_table_stride + begin / args.page_size];
      return tile::max(0, tile::min(entry, args.num_pages - 1));  // as tile::PagedRows
    }

    /// Initialises this producer's barriers. Called by one thread.
    __device__ __forceinline__ void initialize() const {
      for (int stage_idx = 0; stage_idx < stages; ++stage_idx) {
        ptx::mbarrier_init(full[stage_idx], sharers);
        ptx::mbarrier_init(empty[stage_idx], config.num_warps);
      }
      ptx::mbarrier_init_fence();
      ptx::fence_async_shared();  // TMA must see them too: this warp's copies may begin before the block's first barrier
    }

    /// Loads all tiles of the run. The next tile's page is looked up right after this tile's boxes are issued, so the
    /// latency of the table overlaps with the wait for the next stage.
    __device__ __forceinline__ void produce(const decode::Run<config>& run) const {
      decode::Cursor<config> cursor = run.start;
      int page = look_up(cursor);
#pragma unroll 1
      for (int position = run.begin;; ++position) {
        load(position - run.begin, cursor.item, cursor.tile, page);
        if (position + 1 == run.end) return;
        cursor.next(args);
        page = look_up(cursor);
        if (cursor.tile == cursor.item.first_tile && &map == &args.maps[decode_map_K])
          decode::prefetch_Q(args, cursor.item);
      }
    }
  };

  __device__ __forceinline__ Producer producer_of(int warp) const {
    const bool of_keys = warp % 2 == 0;
    return {args,
            args.maps[of_keys ? decode_map_K : decode_map_V],
            of_keys ? barriers.K_full : barriers.V_full,
            of_keys ? barriers.K_empty : barriers.V_empty,
            of_keys ? storage.stage[0].K.bytes : storage.stage[0].V.bytes,
            of_keys ? KTile::panels : VTile::panels,
            of_keys ? KTile::panel_bytes : VTile::panel_bytes,
            warp / 2};
  }

  /// Initialises the barriers. The producer of K initialises those of K, the producer of V those of V. So each of them can
  /// issue its first boxes before any other warp has arrived.
  __device__ __forceinline__ void prepare(int warp) const {
    if (features.paged && decode::Run<config>::is_short && warp == producer_warps - 1) prefetch_pages();
    if (warp >= 2 * sharers || threadIdx.x % 32 != 0) return;
    const Producer producer = producer_of(warp);
    ptx::tma_prefetch(producer.map);
    if (warp < 2) producer.initialize();
  }

  /// Prefetches the page table of this block's sequence into L2, 128 bytes a lane, while the sequence's length is read.
  __device__ __forceinline__ void prefetch_pages() const {
    const int first = static_cast<int>(threadIdx.x) % 32 * 32;
    const int* table = args.page_table + static_cast<long long>(blockIdx.z) * args.page_table_stride;
    if (first < tile::ceil_div(args.seq_kv, args.page_size)) ptx::prefetch_L2(table + first);
  }

  __device__ __forceinline__ void produce(int warp, const decode::Run<config>& run) const {
    Consumer::Finish::Cluster::arrive();
    if (warp >= 2 * sharers || run.begin == run.end) return;
    __syncwarp();  // lane 0 has initialised this warp's barriers
    if constexpr (sharers > 1) ptx::barrier_sync_apart(barrier_sharers + warp % 2, 32 * sharers);
    ptx::barrier_arrive(barrier_ready, all_threads);
    producer_of(warp).produce(run);
  }

  __device__ __forceinline__ void consume(const decode::Run<config>& run) const {
    if (run.begin == run.end) return Consumer::Finish::Cluster::arrive();
    Consumer consumer(args, storage, run);
    Consumer::Finish::Cluster::prepare(storage.finish.mailbox, args, run.start.item);
    ptx::barrier_sync(barrier_ready, all_threads);  // the producers have initialised the barriers
    Gate gate{barriers, tile::PipelineState<stages>{0}};
#pragma unroll 1
    for (int position = run.begin; position < run.end; ++position) {
      consumer.take(position, gate.kv.stage, gate);
      gate.kv.advance();
    }
  }

  __device__ __forceinline__ static void give_registers() {
    if constexpr (registers.producer > 0) ptx::registers_decrease<registers.producer>();
  }
  __device__ __forceinline__ static void take_registers() {
    if constexpr (registers.consumer > 0) ptx::registers_increase<registers.consumer>();
  }

  __device__ __forceinline__ void work() const {
    const int warp = static_cast<int>(threadIdx.x) / 32 - config.num_warps;  // producers count from 0; consumers: below 0
    using Run = decode::Run<config>;
    // A short search for the run is computed in one place for both roles, so its instructions are fetched once. A long one
    // is inlined in each role, after the registers have been moved.
    if constexpr (Run::is_short) {
      if (warp >= 0) prepare(warp);
      const Run run(args);
      if (warp >= 0) {
        give_registers();
        return produce(warp, run);
      }
      take_registers();
      return consume(run);
    }
    if (warp >= 0) {
      give_registers();
      prepare(warp);
      return produce(warp, Run(args));
    }
    take_registers();
    consume(Run(args));
  }
};

template <ForwardConfig config>
__device__ __forceinline__ void decode_sm90(const AttentionArgs& args) {
  tile::clear_output_tail<config>(args, threadIdx.x, decode_threads(config));
  DecodeSm90<config>{args, ptx::shared_storage<typename DecodeSm90<config>::SharedStorage>()}.work();
}

}  // namespace flash_attention
