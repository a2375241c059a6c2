#pragma once

#include "decode/schedule.cuh"
#include "decode/tiles.cuh"
#include "ptx/async.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "tile/narrow.cuh"
#include "tile/scales.cuh"

// K and V of a tile into shared memory by cp.async, 16 bytes a lane. A warp copies the same rows of every tile; where warps
// share no keys it is also the one that reads them, and needs no other warp's barrier. Keys that no row of the item sees
// become zero without being read: what is there, NaN or another sequence's page, cannot reach a product.
//
// With pages a lane looks up the page of one row, for the next tile, while the present one is in flight: the table's
// latency is spent once, at the start.

namespace flash_attention::decode {

template <ForwardConfig config>
struct Loader {
  static constexpr Features features = config.features;
  static constexpr int sharers = config.num_warps / config.key_groups;  // warps that copy a tile
  static constexpr int own_rows = config.block_kv / sharers;
  using Element = ptx::Element<features.dtype>;
  using Key = tile::Stored<key_type(features)>;
  static constexpr int chunk_elements = 16 / sizeof(Key);
  using KTile = typename DecodeTiles<config>::K;
  using VTile = typename DecodeTiles<config>::V;
  static_assert(own_rows % 16 == 0 && own_rows <= 32);

  const AttentionArgs& args;
  Cursor<config>& cursor;  // of the tile that is loaded next; the warp's own, in shared memory: registers are scarce
  int left;                // tiles
  int lane = threadIdx.x % 32;
  int first_row = static_cast<int>(threadIdx.x) / 32 % sharers * own_rows;  // of a tile
  int page = 0;                                                             // of this lane's row of the next tile
  int page_row = 0;
  float k_scale = 0, v_scale = 0;  // of the same row, where rows have scales

  __device__ __forceinline__ Loader(const AttentionArgs& arguments, const Run<config>& run, Cursor<config>& place)
      : args(arguments), cursor(place), left(run.end - run.begin) {
    if (lane == 0) cursor = run.start;
    __syncwarp();  // the cursor is ready
    look_up(run.start);
  }

  /// Starts the copies of the next tile, if there is one, and closes their group.
  __device__ __forceinline__ void load(unsigned K_smem, unsigned V_smem, unsigned scale_smem) {
    if (left > 0) {
      Cursor<config> now = cursor;
      if (takes(now.tile)) {
        store_scales(scale_smem);
        copy<KTile, config.head_dim>(now, args.K, K_smem);
        copy<VTile, config.head_dim_v>(now, args.V, V_smem);
      }
      if (--left > 0) {
        now.next(args);
        look_up(now);
        if (now.tile == now.item.first_tile && first_row == 0) prefetch_Q(args, now.item);
        __syncwarp();  // everyone has read the cursor
        if (lane == 0) cursor = now;
        __syncwarp();  // and will read the new one
      }
    }
    ptx::copy_async_commit();
  }

 private:
  /// Whether a tile is this warp's: groups of warps take them in turn.
  __device__ __forceinline__ static bool takes(int tile) {
    return config.key_groups == 1 || tile % config.key_groups == static_cast<int>(threadIdx.x) / 32 / sharers;
  }

  /// Those of K, then of V. They were prefetched one tile ago.
  __device__ __forceinline__ void store_scales(unsigned scale_smem) const {
    if constexpr (features.token_scales) {
      if (lane >= own_rows) return;
      const unsigned to = scale_smem + (first_row + lane) * 4;
      ptx::store_shared(to, k_scale);
      ptx::store_shared(to + config.block_kv * 4, v_scale);
    }
  }

  __device__ __forceinline__ void look_up(const Cursor<config>& next) {
    if constexpr (features.paged || features.token_scales) {
      const int j = next.tile * config.block_kv + first_row + lane;
      if (left <= 0 || lane >= own_rows || !takes(next.tile)) return;
      k_scale = v_scale = 0;  // what no query sees
      if (j < next.item.seen.begin || j >= next.item.seen.end) return;
      if constexpr (features.paged) {
        const int entry = args.page_table[next.item.batch_idx * args.page_table_stride + j / args.page_size];
        page = tile::max(0, tile::min(entry, args.num_pages - 1));  // as tile::PagedRows
        page_row = j % args.page_size;
      }
      if constexpr (features.token_scales) {
        const long long start = features.packed && !features.paged ? args.cu_seqlens_kv[next.item.batch_idx] : 0;
        const long long from = features.paged ? page : features.packed ? 0 : next.item.batch_idx;
        const long long row = features.paged ? page_row : start + j;
        k_scale = *tile::scale_of_row(args.K_scale, from, row, next.item.kv_head_idx);
        v_scale = *tile::scale_of_row(args.V_scale, from, row, next.item.kv_head_idx);
      }
    }
  }

  template <typename Tile, int columns>
  __device__ __forceinline__ void copy(const Cursor<config>& now, const TensorView& view, unsigned tile_smem) const {
    constexpr int chunks = Tile::columns / 8;
    const int kv_begin = now.tile * config.block_kv + first_row;
    const auto* base = static_cast<const Key*>(view.data) + now.item.kv_head_idx * view.head_stride;
    if constexpr (!features.paged) {
      const long long start = features.packed ? args.cu_seqlens_kv[now.item.batch_idx] : 0;
      base += now.item.batch_idx * view.batch_stride + (start + kv_begin) * view.seq_stride;
    }
// More addresses than that would fill the registers where a warp has many scores or columns.
#pragma unroll(config.head_dim_v > 128 || config.block_q > 16 ? 2 : 8)
    for (int index = lane; index < own_rows * chunks; index += 32) {
      const int row = index / chunks, chunk = index % chunks, j = kv_begin + row;
      const bool exists = j >= now.item.seen.begin && j < now.item.seen.end && chunk * chunk_elements < columns;
      long long offset = row * view.seq_stride;
      if constexpr (features.paged) {
        offset = ptx::shuffle(page, row) * view.batch_stride + ptx::shuffle(page_row, row) * view.seq_stride;
      }
      ptx::copy_async(tile_smem + Tile::offset(first_row + row, chunk), base + offset + chunk * chunk_elements,
                      exists ? 16 : 0);
    }
  }
};

}  // namespace flash_attention::decode
