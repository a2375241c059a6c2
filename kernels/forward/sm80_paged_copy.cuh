#pragma once

#include "ptx/async.cuh"
#include "ptx/registers.cuh"
#include "ptx/warp.cuh"
#include "tile/key_source.cuh"
#include "tile/score.cuh"
#include "tile/swizzle.cuh"

// Tiles of K and V out of pages into swizzled shared memory by cp.async, 16 bytes a lane. A warp copies the same rows of
// every tile; a lane looks up the page of one or two of them, once for K and V and before the copies need it, so that the
// table's latency is hidden by other work.

namespace flash_attention::sm80 {

/// Where this warp's rows of a tile of `rows` keys are. It is kept through a kernel's main loop, so it keeps no more than
/// that.
template <int threads, int rows>
struct PagedPlaces {
  static constexpr int own_rows = rows / (threads / 32);
  static constexpr int per_lane = tile::ceil_div(own_rows, 32);
  static_assert(rows % (threads / 32) == 0);

  int page[per_lane], row[per_lane];  // of rows lane, lane + 32, ... of this warp's; row -1: no query sees the key

  /// The places of the tile that begins at kv_begin. Keys outside of `seen` are not looked up: their entries of the table
  /// may be anything.
  __device__ __forceinline__ void look_up(const abi::AttentionArgs& args, int batch_idx, const tile::KeyRange& seen,
                                          int kv_begin) {
    const int* table = args.page_table + batch_idx * args.page_table_stride;
#pragma unroll
    for (int n = 0; n < per_lane; ++n) {
      const int r = 32 * n + lane(), j = kv_begin + first_row() + r;
      page[n] = 0, row[n] = -1;
      if (r >= own_rows || j < seen.begin || j >= seen.end) continue;
      const int index = j / args.page_size;
      page[n] = tile::max(0, tile::min(table[index], args.num_pages - 1));  // as PagedRows
      row[n] = j - index * args.page_size;
    }
  }

  /// Starts the copy of the tile's rows of one head of K or V. Keys that no query sees become zero and are not read, nor
  /// are columns at or past `dim`. The caller commits and waits.
  template <int dim, typename Tile, typename Element>
  __device__ __forceinline__ void copy(unsigned address, const abi::TensorView& view, int head_idx) const {
    constexpr int chunks = Tile::columns / 8, per_chunk = Tile::template per_chunk<Element>;
    static_assert(dim % per_chunk == 0 && dim <= chunks * per_chunk && Tile::rows == rows);
    const auto* base = static_cast<const Element*>(view.data) + head_idx * view.head_stride;
    const int first = first_row();
    // Unrolled further, the addresses would fill the registers.
#pragma unroll 2
    for (int index = lane(); index < tile::ceil_div(own_rows * chunks, 32) * 32; index += 32) {  // all lanes: they shuffle
      const int r = index / chunks, chunk = index % chunks;
      int its_page = ptx::shuffle(page[0], r % 32), its_row = ptx::shuffle(row[0], r % 32);
#pragma unroll
      for (int more = 1; more < per_lane; ++more) {
        const int other_page = ptx::shuffle(page[more], r % 32), other_row = ptx::shuffle(row[more], r % 32);
        if (r / 32 == more) its_page = other_page, its_row = other_row;
      }
      if (own_rows * chunks % 32 != 0 && r >= own_rows) break;
      ptx::copy_async(address + Tile::offset(first + r, chunk),
                      base + its_page * view.batch_stride + its_row * view.seq_stride + chunk * per_chunk,
                      its_row >= 0 && chunk * per_chunk < dim ? 16 : 0);
    }
  }

 private:
  __device__ __forceinline__ static int thread() { return static_cast<int>(ptx::registers_fresh(threadIdx.x)); }
  __device__ __forceinline__ static int lane() { return thread() % 32; }
  __device__ __forceinline__ static int first_row() { return thread() / 32 * own_rows; }
};

}  // namespace flash_attention::sm80
