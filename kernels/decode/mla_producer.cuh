#pragma once

#include "decode/mla_storage.cuh"
#include "ptx/async.cuh"
#include "ptx/tma.cuh"

// The warpgroup of decode/mla_sm90 that loads: latent keys through the page table, by cp.async, 16 bytes a lane. A stage is
// filled in three parts, each with a separate barrier, so that products begin before all of it has landed, and a part
// is filled again as soon as the warpgroup that read it last is done. Warps 0 and 1 fill stage 0, the others stage 1; of
// the values each warp has one half, and the second of a stage the key's own columns, too. So a warp waits for its own
// copies alone, and sees every phase of the barriers that it waits for. Keys that no row of the item sees become zero
// without being read.
//
// A lane looks up the pages of two rows of the next KV block while the copies of the present one are in flight.
//
// Where pages are multiples of KV blocks (config.producer_warp), one lane asks TMA for a part whose keys are all seen.

namespace flash_attention::mla {

/// Indices into AttentionArgs::maps: the values, [64, rows, 8, heads, batch or pages] in boxes of 4 panels of a KV block,
/// and the key's own columns, [64, rows, heads, batch or pages].
enum Map : int { map_values = 0, map_own = 1 };

template <ForwardConfig config>
struct Producer {
  static constexpr Features features = config.features;
  using Element = ptx::Element<features.dtype>;

  const AttentionArgs& args;
  SharedStorage<config>& shared;
  int lane = threadIdx.x % 32;
  int page[2] = {};  // of rows `lane` and `lane` + 32 of the next part
  int page_row[2] = {};

  __device__ __forceinline__ static bool sees(const decode::Item<config>& item, int j) {
    return j >= item.seen.begin && j < item.seen.end;
  }

  __device__ __forceinline__ void look_up(const decode::Cursor<config>& next) {
    if constexpr (features.paged) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int j = next.tile * mla_block_kv + lane + 32 * half;
        if (!sees(next.item, j)) continue;
        const int entry = args.page_table[next.item.batch_idx * args.page_table_stride + j / args.page_size];
        page[half] = tile::max(0, tile::min(entry, args.num_pages - 1));  // as tile::PagedRows
        page_row[half] = j % args.page_size;
      }
    }
  }

  /// Whether some row of the item sees each key of the tile.
  __device__ __forceinline__ static bool sees_all(const decode::Cursor<config>& now) {
    const int begin = now.tile * mla_block_kv;
    return begin >= now.item.seen.begin && begin + mla_block_kv <= now.item.seen.end;
  }

  /// Where the boxes of a tile are, in lane 0: those of its first key.
  struct BoxPlace {
    int row;
    int batch;
  };
  __device__ __forceinline__ BoxPlace box_place(const decode::Cursor<config>& now) const {
    const int start = features.packed && !features.paged ? static_cast<int>(args.cu_seqlens_kv[now.item.batch_idx]) : 0;
    return {features.paged ? page_row[0] : start + now.tile * mla_block_kv, features.paged    ? page[0]
                                                                            : features.packed ? 0
                                                                                              : now.item.batch_idx};
  }

  /// This warp's parts of a stage, by TMA, which signals by itself.
  __device__ __forceinline__ void load_boxes(const decode::Cursor<config>& now, int stage, int half, int room) const {
    if (lane == 0) {
      ptx::path<"decode/mla_sm90 boxes">();
      const BoxPlace at = box_place(now);
      ptx::mbarrier_arrive_expect_tx(shared.full[stage][half], panels_of_half * StageTile::panel_bytes);
      ptx::tma_load_5d(shared.stage[stage].bytes + half * panels_of_half * StageTile::panel_bytes, args.maps[map_values],
                       shared.full[stage][half], 0, at.row, half * panels_of_half, now.item.kv_head_idx, at.batch);
      if (half == 1) {
        ptx::mbarrier_wait(shared.empty[stage][0], room);  // P was there
        ptx::mbarrier_arrive_expect_tx(shared.full[stage][2], StageTile::panel_bytes);
        ptx::tma_load_4d(shared.stage[stage].bytes + value_panels * StageTile::panel_bytes, args.maps[map_own],
                         shared.full[stage][2], 0, at.row, now.item.kv_head_idx, at.batch);
      }
    }
    __syncwarp();  // no lane goes on before the other warpgroup's stage is known to be empty
  }

  __device__ __forceinline__ unsigned part_smem(int stage, int first_panel) const {
    return ptx::shared_address(&shared.stage[stage]) + first_panel * StageTile::panel_bytes;
  }

  /// Panels [first, first + panels) of the stage, from `column` of a tensor's rows on. Eight lanes copy 128
  /// bytes of a row, a panel after the other.
  template <int first, int panels>
  __device__ __forceinline__ void copy(const decode::Cursor<config>& now, const TensorView& view, int stage, int column) {
    constexpr int lanes = 8;  // of a row
    const int chunk = lane % lanes;
    const auto* base =
        static_cast<const Element*>(view.data) + now.item.kv_head_idx * view.head_stride + column + chunk * 8;
    if constexpr (!features.paged) {
      const long long start = features.packed ? args.cu_seqlens_kv[now.item.batch_idx] : 0;
      base += now.item.batch_idx * view.batch_stride + start * view.seq_stride;
    }
    const unsigned to = part_smem(stage, first);
    constexpr int together = config.producer_warp ? 1 : 4;  // with boxes this is the last KV block of a sequence
#pragma unroll together
    for (int begin = 0; begin < mla_block_kv; begin += 32 / lanes) {
      const int row = begin + lane / lanes, j = now.tile * mla_block_kv + row;
      long long offset = j * view.seq_stride;
      if constexpr (features.paged) {
        offset = ptx::shuffle(begin < 32 ? page[0] : page[1], row % 32) * view.batch_stride +
                 ptx::shuffle(begin < 32 ? page_row[0] : page_row[1], row % 32) * view.seq_stride;
      }
      const bool exists = sees(now.item, j);
      const Element* from = base + (exists ? offset : 0);
#pragma unroll
      for (int panel = 0; panel < panels; ++panel) {
        ptx::copy_async(to + StageTile::offset(row, chunk) + panel * StageTile::panel_bytes, from + panel * 64,
                        exists ? 16 : 0);
      }
    }
    ptx::copy_async_commit();
  }

  /// The copies of a part have landed.
  __device__ __forceinline__ void signal(int stage, int part) const {
    ptx::fence_async_shared();  // the products read it
    __syncwarp();               // every lane's copies have landed
    if (lane == 0) ptx::mbarrier_arrive(shared.full[stage][part]);
  }

  __device__ __forceinline__ void run() {
    const int warp = static_cast<int>(threadIdx.x) / 32 % 4, stage = warp / 2, half = warp % 2;
    const int count = shared.run.end - shared.run.begin;
    decode::Cursor<config> cursor = shared.run.start;
    if (stage < count && stage == 1) cursor.next(args);
    look_up(cursor);
#pragma unroll 1
    for (int n = stage; n < count; n += mla_stages) {
      const int room = n / mla_stages % 2 ^ 1;
      ptx::mbarrier_wait(shared.empty[stage][half], room);
      const bool in_boxes = config.producer_warp && sees_all(cursor);
      if (in_boxes) {
        load_boxes(cursor, stage, half, room);
      } else if (half == 0) {
        copy<0, panels_of_half>(cursor, args.V, stage, 0);
      } else {
        copy<panels_of_half, panels_of_half>(cursor, args.V, stage, panels_of_half * 64);
        ptx::mbarrier_wait(shared.empty[stage][0], room);  // P was there
        copy<value_panels, 1>(cursor, args.K, stage, 0);
      }
      for (int step = 1; step <= mla_stages && n + step < count; ++step) cursor.next(args);
      if (n + mla_stages < count) look_up(cursor);
      if (in_boxes) continue;
      if (half == 0) {
        ptx::copy_async_wait<0>();
        signal(stage, 0);
      } else {
        ptx::copy_async_wait<1>();
        signal(stage, 1);
        ptx::copy_async_wait<0>();
        signal(stage, 2);
      }
    }
  }
};

}  // namespace flash_attention::mla
