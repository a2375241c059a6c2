#pragma once

#include "abi/decode.h"
#include "decode/schedule.cuh"
#include "decode/tiles.cuh"
#include "ptx/async.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "tile/group_pairs.cuh"

// Loads K and V in 4 bits: codes by cp.async, scales through registers, where they become numbers of 16 bits.
//
// A warp loads the rows that it reads itself, keys and values apart:
//
//   load:   codes -> shared memory (in flight);  scales -> registers (in flight)
//   ready:  wait for the codes;  scales -> shared memory
//
// K and V of a tile take turns, so at any time one of them is in flight. Rows that no query of the item sees are zeros, and
// are not read. With pages, a lane looks up the pages of its rows of the next tile when it has asked for the values of this
// one. Without, it knows where its rows begin, and moves on by a tile: these are so few bytes that instructions count.

namespace flash_attention::decode {

using namespace abi;

/// index * stride in one instruction: neither is negative, and both have 32 bits (the planner sees to it).
__device__ __forceinline__ long long near(int index, long long stride) {
  return static_cast<long long>(static_cast<unsigned long long>(static_cast<unsigned>(index)) *
                                static_cast<unsigned>(stride));
}

/// The scales, and of int4 the zeros, of one row: in registers as they are stored.
template <ForwardConfig config, bool of_keys>
struct GroupRow {
  static constexpr Features features = config.features;
  static constexpr Type code = features.kv_dtype, type = features.dtype;
  static constexpr DecodeGroups groups{config};
  using Scale = tile::GroupScale<features>;
  static constexpr int count = of_keys ? groups.of_k : groups.of_v, bytes = count * static_cast<int>(sizeof(Scale));
  static constexpr int words = tile::ceil_div(bytes, 4);
  static constexpr bool has_zeros = groups.numbers > 1;

  unsigned scales[words], zeros[has_zeros ? words : 1];

  /// Starts the loads of a row, in accesses as wide as its alignment.
  __device__ __forceinline__ void load(const GroupView& view, long long offset, bool exists) {
    load_row(scales, static_cast<const Scale*>(view.scales) + offset, exists);
    if constexpr (has_zeros) load_row(zeros, static_cast<const Scale*>(view.zeros) + offset, exists);
  }

  /// Stores the numbers of the row; the zeros follow the scales of all rows.
  __device__ __forceinline__ void store(unsigned to) const {
    store_row(to, [&](int i) { return tile::scale_pair<code, type>(scales, i); });
    if constexpr (has_zeros) store_row(to + config.block_kv * count * 2, [&](int i) { return zeros[i]; });
  }

 private:
  template <int row_words>
  __device__ __forceinline__ static void load_row(unsigned (&row)[row_words], const void* from, bool exists) {
    if constexpr (bytes % 4 == 0) {
      constexpr int width = row_words % 4 == 0 ? 4 : row_words % 2 == 0 ? 2 : 1;
#pragma unroll
      for (int first = 0; first < row_words; first += width) {
        ptx::Vector<unsigned, width> loaded{};
        if (exists)
          loaded = ptx::load_readonly(
              reinterpret_cast<const ptx::Vector<unsigned, width>*>(static_cast<const unsigned*>(from) + first));
#pragma unroll
        for (int i = 0; i < width; ++i) row[first + i] = loaded[i];
      }
    } else {
      const auto* pieces = static_cast<const unsigned short*>(from);
#pragma unroll
      for (int i = 0; i < bytes / 2; ++i) {
        const unsigned piece = exists ? ptx::load_readonly(pieces + i) : 0u;
        row[i / 2] = i % 2 == 0 ? piece : row[i / 2] | piece << 16;
      }
    }
  }

  /// pair(i): two of the numbers.
  template <typename Pair>
  __device__ __forceinline__ static void store_row(unsigned to, Pair pair) {
    if constexpr (count % 2 == 0) {
      constexpr int width = count % 8 == 0 ? 4 : count % 4 == 0 ? 2 : 1;  // words
#pragma unroll
      for (int first = 0; first < count / 2; first += width) {
        ptx::Vector<unsigned, width> stored;
#pragma unroll
        for (int i = 0; i < width; ++i) stored[i] = pair(first + i);
        ptx::store_shared(to + static_cast<unsigned>(4 * first), stored);
      }
    } else {
#pragma unroll
      for (int i = 0; i < count; ++i)
        ptx::store_shared(to + static_cast<unsigned>(2 * i), static_cast<unsigned short>(pair(i / 2) >> i % 2 * 16));
    }
  }
};

template <ForwardConfig config>
struct CodeLoader {
  static constexpr Features features = config.features;
  static constexpr DecodeGroups groups{config};
  static constexpr int own_rows = config.block_kv / config.num_warps;
  static constexpr int lane_rows = tile::ceil_div(own_rows, 32);  // of which a lane loads scales and knows the page
  static_assert(own_rows % 16 == 0 && config.key_groups == 1);

  const AttentionArgs& args;
  Cursor<config>& cursor;  // the tile to load next; one for each warp, in shared memory because registers are scarce
  unsigned K_smem, V_smem, groups_smem;
  int left;  // tiles
  int lane = threadIdx.x % 32;
  int first_row = static_cast<int>(threadIdx.x) / 32 * own_rows;  // of this warp, in a tile
  GroupRow<config, true> of_keys[lane_rows];
  GroupRow<config, false> of_values[lane_rows];

  /// Where this lane's rows are: with pages of the next tile, else where its first row begins, of codes in bytes, of scales
  /// in numbers.
  struct Pages {
    int page[lane_rows], row[lane_rows];
  };
  struct Rows {
    long long K, V, K_groups, V_groups;
  };
  tile::Choose<features.paged, Pages, Rows> places;

  template <typename Stage, typename Groups>
  __device__ __forceinline__ CodeLoader(const AttentionArgs& arguments, const Run<config>& run, Cursor<config>& place,
                                        Stage& stage, Groups& scales)
      : args(arguments),
        cursor(place),
        K_smem(ptx::shared_address(&stage)),
        V_smem(K_smem + Stage::value_offset),
        groups_smem(ptx::shared_address(&scales)),
        left(run.end - run.begin) {
    if (lane == 0) cursor = run.start;
    __syncwarp();  // the cursor is ready
    find(run.start);
  }

  /// Starts the loads of the keys of the next tile, if there is one, or of its values; then moves on. Always commits a
  /// group, even an empty one: ready() counts groups.
  template <bool keys>
  __device__ __forceinline__ void load() {
    __syncwarp();  // all lanes have read what is overwritten
    if (left > 0) {
      if constexpr (keys) {
        copy<typename DecodeTiles<config>::K>(args.K, K_smem, [&](const auto& at) { return at.K; });
        load_groups(of_keys, args.K_groups, [&](const auto& at) { return at.K_groups; });
      } else {
        copy<typename DecodeTiles<config>::V>(args.V, V_smem, [&](const auto& at) { return at.V; });
        load_groups(of_values, args.V_groups, [&](const auto& at) { return at.V_groups; });
        if (--left > 0) advance();
      }
    }
    ptx::copy_async_commit();
  }

  /// Waits for the keys of the oldest tile in flight, or for its values.
  template <bool keys>
  __device__ __forceinline__ void ready() {
    // While keys are multiplied 32 at a time, the next ones are asked for after the first values.
    ptx::copy_async_wait<keys || own_rows <= 32 ? 1 : 0>();
#pragma unroll
    for (int r = 0; r < lane_rows; ++r) {
      const int row = first_row + 32 * r + lane;
      if (own_rows % 32 != 0 && 32 * r + lane >= own_rows) continue;
      if constexpr (keys) {
        of_keys[r].store(groups_smem + static_cast<unsigned>(row * groups.key_bytes));
      } else {
        of_values[r].store(groups_smem + static_cast<unsigned>(groups.values + row * groups.value_bytes));
      }
    }
    __syncwarp();  // the copies and scales of all lanes have landed
  }

 private:
  template <typename View>
  __device__ __forceinline__ static long long offset_of(const View& view, int from, int row, int head_idx) {
    return from * view.batch_stride + near(row, view.seq_stride) + near(head_idx, view.head_stride);
  }

  /// Finds this lane's rows of a tile.
  __device__ __forceinline__ void find(const Cursor<config>& now) {
    if constexpr (features.paged) {
#pragma unroll
      for (int r = 0; r < lane_rows; ++r) {
        const int row = 32 * r + lane, j = now.tile * config.block_kv + first_row + row;
        places.page[r] = places.row[r] = 0;
        if (row >= own_rows || j < now.item.seen.begin || j >= now.item.seen.end) continue;
        const int entry = args.page_table[now.item.batch_idx * args.page_table_stride + j / args.page_size];
        places.page[r] = tile::max(0, tile::min(entry, args.num_pages - 1));  // as tile::PagedRows
        places.row[r] = j % args.page_size;
      }
    } else {
      const int start = features.packed ? args.cu_seqlens_kv[now.item.batch_idx] : 0;
      const int from = features.packed ? 0 : now.item.batch_idx, head_idx = now.item.kv_head_idx;
      const int row = start + now.tile * config.block_kv + first_row;
      places = {offset_of(args.K, from, row, head_idx), offset_of(args.V, from, row, head_idx),
                offset_of(args.K_groups, from, row + lane, head_idx), offset_of(args.V_groups, from, row + lane, head_idx)};
    }
  }

  /// The same for the next tile of the item.
  __device__ __forceinline__ void move(const Cursor<config>& now) {
    if constexpr (features.paged) {
      find(now);
    } else {
      places.K += near(config.block_kv, args.K.seq_stride), places.V += near(config.block_kv, args.V.seq_stride);
      places.K_groups += near(config.block_kv, args.K_groups.seq_stride);
      places.V_groups += near(config.block_kv, args.V_groups.seq_stride);
    }
  }

  __device__ __forceinline__ void advance() {
    Cursor<config> now = cursor;
    const bool same_item = now.tile + 1 < now.item.end_tile;
    now.next(args);
    if (same_item) {
      move(now);
    } else {
      find(now);
      if (first_row == 0) prefetch_Q(args, now.item);
    }
    __syncwarp();  // all lanes have read the old cursor
    if (lane == 0) {
      cursor.tile = now.tile;
      if (!same_item) cursor.item = now.item;
    }
    __syncwarp();  // all lanes see the new one
  }

  /// Whether row `row` of this warp is a key that some query of the item sees.
  struct Seen {
    int first, count;
    __device__ __forceinline__ bool operator()(int row) const {
      return static_cast<unsigned>(first + row) < static_cast<unsigned>(count);
    }
  };
  __device__ __forceinline__ Seen seen() const {
    const tile::KeyRange range = cursor.item.seen;
    return {cursor.tile * config.block_kv + first_row - range.begin, range.end - range.begin};
  }

  /// Copies the rows of codes of this warp, 16 bytes a lane. first(places): where they begin, without pages.
  template <typename Tile, typename First>
  __device__ __forceinline__ void copy(const TensorView& view, unsigned tile_smem, First first) const {
    constexpr int chunks = Tile::columns / 8;
    constexpr bool steps = 32 % chunks == 0;                 // a lane copies the same chunk of each row
    constexpr bool repeats = steps && 32 / chunks % 8 == 0;  // which lies in the same place
    const Seen exists = seen();
    const int head_idx = features.paged ? cursor.item.kv_head_idx : 0;
    const auto* data = static_cast<const unsigned char*>(view.data);
#pragma unroll
    for (int index = 0; index < own_rows * chunks; index += 32) {
      const int row = steps ? lane / chunks + index / chunks : (lane + index) / chunks,
                chunk = steps ? lane % chunks : (lane + index) % chunks;
      long long offset;
      if constexpr (features.paged) {
        const int r = steps ? index / chunks / 32 : 0;
        const auto of_row = [&](const int(&values)[lane_rows]) {
          if (steps || lane_rows == 1) return ptx::shuffle(values[r], row % 32);
          const int low = ptx::shuffle(values[0], row % 32), high = ptx::shuffle(values[lane_rows - 1], row % 32);
          return row < 32 ? low : high;
        };
        offset = offset_of(view, of_row(places.page), of_row(places.row), head_idx);
      } else {
        offset = first(places) + near(row, view.seq_stride);
      }
      const unsigned to =
          repeats ? Tile::offset(first_row + lane / chunks, chunk) + static_cast<unsigned>(index / chunks * Tile::row_bytes)
                  : Tile::offset(first_row + row, chunk);
      ptx::copy_async(tile_smem + to, data + offset + chunk * 16, exists(row) ? 16 : 0);
    }
  }

  template <typename Row, typename First>
  __device__ __forceinline__ void load_groups(Row (&rows)[lane_rows], const GroupView& view, First first) {
    const Seen exists = seen();
    const int head_idx = features.paged ? cursor.item.kv_head_idx : 0;
#pragma unroll
    for (int r = 0; r < lane_rows; ++r) {
      const int row = 32 * r + lane;
      long long offset;
      if constexpr (features.paged) {
        offset = offset_of(view, places.page[r], places.row[r], head_idx);
      } else {
        offset = first(places) + near(32 * r, view.seq_stride);
      }
      rows[r].load(view, offset, row < own_rows && exists(row));
    }
  }
};

}  // namespace flash_attention::decode
