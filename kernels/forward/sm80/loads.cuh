#pragma once

// Copies tiles of K and V from pages to swizzled shared memory with cp.async, 16 bytes a lane. A warp copies the same rows
// of every tile. A lane looks up the pages of one or two rows, once for K and V, before the copies need them: so other work
// hides the latency of the table.

#include "ptx/async.cuh"
#include "ptx/registers.cuh"
#include "ptx/warp.cuh"
#include "tile/copy.cuh"
#include "tile/key_source.cuh"
#include "tile/score.cuh"
#include "tile/swizzle.cuh"

namespace flash_attention::sm80 {

/// The pages of this warp's rows of a tile of `rows` keys. It lives through the kernel's main loop, so it holds nothing
/// else.
template <int threads, int rows>
struct PagedPlaces {
  static constexpr int own_rows = rows / (threads / 32);
  static constexpr int per_lane = tile::ceil_div(own_rows, 32);
  static_assert(rows % (threads / 32) == 0);

  int page[per_lane], row[per_lane];  // of rows lane, lane + 32, ... of this warp's; row -1: no query sees the key

  /// Looks up the tile that begins at kv_begin. Keys outside of `seen` are skipped: their entries of the table may be
  /// anything.
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

  /// Starts to copy the tile's rows of one head of K or V. Keys that no query sees, and columns from `dim` on, become zero
  /// without being read. The caller commits and waits.
  template <int dim, typename Tile, typename Element>
  __device__ __forceinline__ void copy(unsigned address, const abi::TensorView& view, int head_idx) const {
    constexpr int chunks = Tile::columns / 8, per_chunk = Tile::template per_chunk<Element>;
    static_assert(dim % per_chunk == 0 && dim <= chunks * per_chunk && Tile::rows == rows);
    const auto* base = static_cast<const Element*>(view.data) + head_idx * view.head_stride;
    const int first = first_row();
    // A larger factor would take too many registers for addresses.
#pragma unroll 2
    for (int index = lane(); index < tile::ceil_div(own_rows * chunks, 32) * 32;
         index += 32) {  // all lanes take part, because they shuffle
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
  __device__ __forceinline__ static int thread() { return static_cast<int>(ptx::hide_from_compiler(threadIdx.x)); }
  __device__ __forceinline__ static int lane() { return thread() % 32; }
  __device__ __forceinline__ static int first_row() { return thread() / 32 * own_rows; }
};

// The loads of forward/sm80 with cp.async, from rows at a fixed stride or from pages. K and V have one buffer each; the
// order is K of a tile, its V, K of the next tile.

/// The first tile begins at key kv_begin. Only this tile may have rows at its end that do not exist.
template <typename Kernel, bool paged>
struct KeyCopies {
  using Element = const typename Kernel::Key;

  const Kernel& kernel;
  tile::TileCopy<Kernel::threads, Kernel::head_dim, typename Kernel::KTile, Element> K;
  tile::TileCopy<Kernel::threads, Kernel::head_dim_v, typename Kernel::VTile, Element> V;

  __device__ __forceinline__ KeyCopies(const Kernel& attends, int kv_begin)
      : kernel(attends),
        K(attends.keys(attends.args.K).from(kv_begin), attends.thread),
        V(attends.keys(attends.args.V).from(kv_begin), attends.thread) {}

  template <bool some_missing>
  __device__ __forceinline__ void load_K() const {
    K.template start<some_missing>(kernel.K_smem, kernel.thread);
    ptx::copy_async_commit();
  }
  /// Loads V of the tile whose K was loaded last. The next tile begins at key `next`, `distance` keys away.
  __device__ __forceinline__ void load_V(int distance, int /*next*/) {
    V.template start<true>(kernel.V_smem, kernel.thread);
    ptx::copy_async_commit();
    V.move(distance);
  }
  __device__ __forceinline__ void move_K(int distance) { K.move(distance); }
};

template <typename Kernel>
struct KeyCopies<Kernel, true> {
  using Element = const typename Kernel::Key;

  const Kernel& kernel;
  PagedPlaces<Kernel::threads, Kernel::block_kv> places;

  __device__ __forceinline__ KeyCopies(const Kernel& attends, int kv_begin) : kernel(attends) { look_up(kv_begin); }

  template <bool some_missing>
  __device__ __forceinline__ void load_K() const {
    places.template copy<Kernel::head_dim, typename Kernel::KTile, Element>(kernel.K_smem, kernel.args.K, kv_head());
    ptx::copy_async_commit();
  }
  /// Loads V, then looks up the pages of the next tile, for its K and its V, while Q K^T is computed.
  __device__ __forceinline__ void load_V(int /*distance*/, int next) {
    places.template copy<Kernel::head_dim_v, typename Kernel::VTile, Element>(kernel.V_smem, kernel.args.V, kv_head());
    ptx::copy_async_commit();
    look_up(next);
  }
  __device__ __forceinline__ void move_K(int /*distance*/) {}

 private:
  __device__ __forceinline__ void look_up(int kv_begin) {
    // Tiles end with the last query's keys, so every row of the last tile that exists has a page.
    const tile::KeyRange seen{kernel.score.sight.keys_of(kernel.q_begin).begin, kernel.score.sight.visible_kv};
    places.look_up(kernel.args, kernel.sequence.batch_idx, seen, kv_begin);
  }
  __device__ __forceinline__ int kv_head() const { return kernel.head_idx / kernel.args.group; }
};

}  // namespace flash_attention::sm80
