#pragma once

#include "decode/code_loader.cuh"
#include "decode/consumer.cuh"
#include "decode/schedule.cuh"
#include "decode/tiles.cuh"
#include "ptx/async.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "tile/key_list.cuh"
#include "tile/narrow.cuh"
#include "tile/scales.cuh"
#include "tile/tail.cuh"

// Attention forward for few queries, sm_80 and up: mma.sync and cp.async, 16-bit queries, K and V in pages or not. With few
// queries the time is the time to read K and V once; the products are hidden.
//
// Grouped queries: a tile of rows holds all query heads of one key head, for some query tokens. Row = token * group + head
// in group. An item is such a tile of rows with the keys that it sees. The key tiles of all items are divided evenly among
// the thread blocks (decode/schedule.cuh), in one launch with as many blocks as the GPU holds at a time. A block executes:
//
//   its run: tiles [begin, end) of all tiles, with num_stages - 1 tiles in flight
//   for each item in the run:
//     Q -> shared memory -> registers
//     for each tile of block_kv keys:
//       start the copies of a later tile;  wait for the oldest tile
//       each warp, for its keys of the tile:   S = Q K^T;  P = softmax step;  O = O * rescale + P V
//     finish: combine the warps' O, maxima and sums -> O and lse, or a part of them      finish.cuh
//
// With 16 rows or fewer each warp copies exactly the keys that it reads. Then the loop over tiles needs no block barrier.

namespace flash_attention::decode {

// Copies K and V of a tile to shared memory with cp.async, 16 bytes a lane. A warp copies the same rows of every tile. If
// warps share no keys, the same warp reads them, so no barrier with other warps is needed. Keys that no row of the item
// sees are written as zeros and not read from memory, so NaN in them, or another sequence's page, cannot reach a product.
//
// With pages, each lane looks up the page of one row of the next tile while the current tile is in flight. So the latency
// of the table is paid only once, at the start. With lists of keys it looks up the key in the same way, and whether the
// query sees it: a tile is block_kv entries of the query's list, and the rows of an item are those of one query. Entries
// that are no key are zeros, and a bit in shared memory for each of the stage's keys tells the consumers.

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
  static_assert(own_rows % 8 == 0 && own_rows <= 32);

  const AttentionArgs& args;
  Cursor<config>& cursor;  // the tile to load next; one for each warp, in shared memory because registers are scarce
  int left;                // tiles
  int lane = threadIdx.x % 32;
  int first_row = static_cast<int>(threadIdx.x) / 32 % sharers * own_rows;  // of this warp, in a tile
  int page = 0;                                                             // of this lane's row of the next tile
  int page_row = 0;
  int key = -1;                    // with lists: the key of that row, -1 if it is none
  float k_scale = 0, v_scale = 0;  // of the same row, if rows have scales

  __device__ __forceinline__ Loader(const AttentionArgs& arguments, const Run<config>& run, Cursor<config>& place)
      : args(arguments), cursor(place), left(run.end - run.begin) {
    if (lane == 0) cursor = run.start;
    __syncwarp();  // the cursor is ready
    look_up(run.start);
  }

  /// Starts the copies of the next tile, if there is one. Always commits a group, even an empty one: the consumers count
  /// groups to know which tile has landed.
  __device__ __forceinline__ void load(unsigned K_smem, unsigned V_smem, unsigned scale_smem, unsigned* listed) {
    if (left > 0) {
      Cursor<config> now = cursor;
      if (takes(now.tile)) {
        store_scales(scale_smem);
        store_listed(listed);
        if constexpr (features.latent) {
          constexpr int values = config.head_dim_v / chunk_elements;
          copy<KTile, config.head_dim_v, 0, values>(now, args.V, K_smem);
          copy<KTile, config.head_dim - config.head_dim_v, values, KTile::columns / 8>(now, args.K, K_smem);
        } else {
          copy<KTile, config.head_dim>(now, args.K, K_smem);
          copy<VTile, config.head_dim_v>(now, args.V, V_smem);
        }
      }
      if (--left > 0) {
        now.next(args);
        look_up(now);
        if (now.tile == now.item.first_tile && first_row == 0) prefetch_Q(args, now.item);
        __syncwarp();  // all lanes have read the old cursor
        if (lane == 0) cursor = now;
        __syncwarp();  // all lanes see the new one
      }
    }
    ptx::copy_async_commit();
  }

 private:
  /// Whether this warp's group takes the tile: groups take tiles alternately.
  __device__ __forceinline__ static bool takes(int tile) {
    return config.key_groups == 1 || tile % config.key_groups == static_cast<int>(threadIdx.x) / 32 / sharers;
  }

  /// Stores the scales of K, then those of V. They were loaded one tile ago.
  __device__ __forceinline__ void store_scales(unsigned scale_smem) const {
    if constexpr (features.token_scales) {
      if (lane >= own_rows) return;
      const unsigned to = scale_smem + (first_row + lane) * 4;
      ptx::store_shared(to, k_scale);
      ptx::store_shared(to + config.block_kv * 4, v_scale);
    }
  }

  /// Which rows of this warp are keys: a bit for each, in the bytes of the stage's bits that are this warp's alone.
  __device__ __forceinline__ void store_listed(unsigned* listed) const {
    if constexpr (features.key_list) {
      const unsigned bits = ptx::ballot(key >= 0);
      if (lane < own_rows / 8)
        reinterpret_cast<unsigned char*>(listed)[first_row / 8 + lane] = static_cast<unsigned char>(bits >> 8 * lane);
    }
  }

  /// The key that a list names, if the query sees it, and its page.
  __device__ __forceinline__ void look_up_list(const Cursor<config>& next) {
    key = -1;
    if (left <= 0 || lane >= own_rows || !takes(next.tile)) return;
    const tile::Sequence sequence = tile::make_sequence<features>(args, next.item.batch_idx);
    const int query = next.item.row_tile / Item<config>::query_tiles;
    const tile::KeyListView list(args, sequence, features.packed, query, args.list_heads > 1 ? next.item.kv_head_idx : 0);
    const int place = next.tile * config.block_kv + first_row + lane, size = features.key_set ? args.list_block_kv : 1;
    if (place / size >= list.count) return;
    const tile::KeyRange seen = tile::Visibility<features>(args, sequence, 0).keys_of(query);
    const int entry = list.template entry<features.key_set>(place / size, tile::ceil_div(seen.end, size));
    if (entry < 0) return;
    const int named = entry * size + place % size;
    if (named < seen.begin || named >= seen.end) return;
    key = named;
    look_up_page(next, key);
  }

  /// The page of key j.
  __device__ __forceinline__ void look_up_page(const Cursor<config>& next, int j) {
    if constexpr (features.paged) {
      const int entry = args.page_table[next.item.batch_idx * args.page_table_stride + j / args.page_size];
      page = tile::max(0, tile::min(entry, args.num_pages - 1));  // as tile::PagedRows
      page_row = j % args.page_size;
    }
  }

  __device__ __forceinline__ void look_up(const Cursor<config>& next) {
    if constexpr (features.key_list) return look_up_list(next);
    if constexpr (features.paged || features.token_scales) {
      const int j = next.tile * config.block_kv + first_row + lane;
      if (left <= 0 || lane >= own_rows || !takes(next.tile)) return;
      k_scale = v_scale = 0;  // for keys that no query sees
      if (j < next.item.seen.begin || j >= next.item.seen.end) return;
      look_up_page(next, j);
      if constexpr (features.token_scales) {
        const long long start = features.packed && !features.paged ? args.cu_seqlens_kv[next.item.batch_idx] : 0;
        const long long from = features.paged ? page : features.packed ? 0 : next.item.batch_idx;
        const long long row = features.paged ? page_row : start + j;
        k_scale = *tile::scale_of_row(args.K_scale, from, row, next.item.kv_head_idx);
        v_scale = *tile::scale_of_row(args.V_scale, from, row, next.item.kv_head_idx);
      }
    }
  }

  /// The columns of a tensor to chunks [first_chunk, end_chunk) of a tile; chunks past them become zero.
  template <typename Tile, int columns, int first_chunk = 0, int end_chunk = Tile::columns / 8>
  __device__ __forceinline__ void copy(const Cursor<config>& now, const TensorView& view, unsigned tile_smem) const {
    constexpr int chunks = end_chunk - first_chunk;
    if constexpr (chunks == 0) return;
    const int kv_begin = now.tile * config.block_kv + first_row;
    const auto* base = static_cast<const Key*>(view.data) + now.item.kv_head_idx * view.head_stride;
    if constexpr (!features.paged) {
      const long long start = features.packed ? args.cu_seqlens_kv[now.item.batch_idx] : 0;
      base += now.item.batch_idx * view.batch_stride + (start + (features.key_list ? 0 : kv_begin)) * view.seq_stride;
    }
// A larger factor needs more registers for addresses than a warp with many scores or columns has left.
#pragma unroll(config.head_dim_v > 128 || config.block_q > 16 ? 2 : 8)
    for (int index = lane; index < tile::round_up(own_rows * chunks, 32); index += 32) {  // the lanes stay together
      const int row = index / chunks, chunk = index % chunks, j = kv_begin + row;
      bool exists = j >= now.item.seen.begin && j < now.item.seen.end && chunk * chunk_elements < columns;
      long long offset = row * view.seq_stride;
      if constexpr (features.key_list) {
        const int named = ptx::shuffle(key, row);
        exists = named >= 0 && chunk * chunk_elements < columns;
        offset = tile::max(named, 0) * view.seq_stride;
      }
      if constexpr (features.paged) {
        offset = ptx::shuffle(page, row) * view.batch_stride + ptx::shuffle(page_row, row) * view.seq_stride;
      }
      if (own_rows * chunks % 32 != 0 && row >= own_rows) continue;
      ptx::copy_async(tile_smem + Tile::offset(first_row + row, first_chunk + chunk),
                      base + offset + chunk * chunk_elements, exists ? 16 : 0);
    }
  }
};

}  // namespace flash_attention::decode

namespace flash_attention {

using namespace abi;

template <ForwardConfig config>
struct DecodeSm80 {
  using Consumer = decode::Consumer<config>;
  static constexpr int stages = config.num_stages;

  /// How a consumer warp waits for a stage and releases it. Either each warp reads only what it has copied, or all warps
  /// of the block share the stage. In the fixed order all share V; the barriers between come after each warp's wait.
  struct Gate {
    __device__ __forceinline__ void K_ready() const {  // V is ready too: both are in one group of copies
      ptx::copy_async_wait<stages - 1>();
      sync_readers();  // cp.async waits only for the thread's own copies: now those of the other readers have landed too
    }
    __device__ __forceinline__ void K_read() const {}
    __device__ __forceinline__ void V_ready() const {}
    __device__ __forceinline__ void V_read() const {  // the next copies may overwrite the stage
      if constexpr (Consumer::ordered) {
        __syncthreads();  // every warp reads all keys' values
      } else {
        sync_readers();
      }
    }

    __device__ __forceinline__ static void sync_readers() {
      if constexpr (Consumer::layout.row_warps == 1 && Consumer::layout.column_warps == 1 && config.key_groups == 1) {
        __syncwarp();
      } else {  // several warps read the same keys, or both groups of warps use the same stages alternately
        ptx::path<"decode/sm80 rows of several warps">();
        __syncthreads();
      }
    }
  };

  __device__ __forceinline__ static int after(int stage) { return stage + 1 == stages ? 0 : stage + 1; }

  /// The loop over the block's tiles. The first num_stages - 1 iterations only load. So there is one call of load(), and
  /// the code stays short: a decode call is so short that fetching its instructions counts.
  __device__ __forceinline__ static void work(const AttentionArgs& args, typename Consumer::SharedStorage& storage) {
    const decode::Run<config> run(args);
    if (run.begin == run.end) return;
    if constexpr (Consumer::grouped)
      return work_on_codes(args, storage, run);
    else
      work_on_rows(args, storage, run);
  }

  __device__ __forceinline__ static void work_on_rows(const AttentionArgs& args, typename Consumer::SharedStorage& storage,
                                                      const decode::Run<config>& run) {
    decode::Loader<config> loader(args, run, storage.loading[threadIdx.x / 32]);
    Consumer consumer(args, storage, run);
    int stage = 0, free_stage = 0;
#pragma unroll 1
    for (int position = run.begin - (stages - 1); position < run.end; ++position) {
      loader.load(consumer.K_smem(free_stage), consumer.V_smem(free_stage), consumer.scale_smem(free_stage),
                  consumer.listed(free_stage));
      free_stage = after(free_stage);
      if (position < run.begin) continue;  // the first tiles are in flight
      consumer.take(position, stage, Gate{});
      stage = after(stage);
    }
  }

  /// With codes of 4 bits there is one stage. While a warp multiplies the values of a tile, the next tile's keys are in
  /// flight to where this tile's were; while it multiplies those, the next tile's values.
  struct CodeGate {
    decode::CodeLoader<config>& loader;

    __device__ __forceinline__ void K_ready() const { loader.template ready<true>(); }
    __device__ __forceinline__ void K_read() const { loader.template load<true>(); }
    __device__ __forceinline__ void V_ready() const { loader.template ready<false>(); }
    __device__ __forceinline__ void V_read() const { loader.template load<false>(); }
  };

  __device__ __forceinline__ static void work_on_codes(const AttentionArgs& args, typename Consumer::SharedStorage& storage,
                                                       const decode::Run<config>& run) {
    decode::CodeLoader<config> loader(args, run, storage.loading[threadIdx.x / 32], storage.stage[0], storage.groups[0]);
    loader.template load<true>();
    loader.template load<false>();
    Consumer consumer(args, storage, run);
#pragma unroll 1
    for (int position = run.begin; position < run.end; ++position) consumer.take(position, 0, CodeGate{loader});
  }
};

template <ForwardConfig config>
__device__ __forceinline__ void decode_sm80(const AttentionArgs& args) {
  tile::clear_output_tail<config>(args, threadIdx.x, 32 * config.num_warps);
  DecodeSm80<config>::work(args, ptx::shared_storage<typename decode::Consumer<config>::SharedStorage>());
}

}  // namespace flash_attention
