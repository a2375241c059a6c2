#pragma once

// The producer warpgroup of decode/mla_sm90, in three forms: boxes of TMA, rows that are gathered by cp.async, and codes of
// 8 bits that become elements. A stage is filled in five parts, each with a separate barrier, so products begin before the
// whole stage has landed. Keys that no row of the item sees become zero without being read. Pages of the next KV block are
// looked up before there is room for it.

#include "abi/tensor_maps.h"
#include "decode/mla_sm90/storage.cuh"
#include "ptx/async.cuh"
#include "ptx/tma.cuh"
#include "tile/key_list.cuh"
#include "tile/narrow_pairs.cuh"

namespace flash_attention::mla {

using namespace abi::mla_maps;

/// Prefetches a warp's quarter of the rows of Q of an item into L2.
template <ForwardConfig config>
__device__ __forceinline__ void prefetch_Q(const AttentionArgs& args, const decode::Item<config>& item, int warp, int lane) {
  constexpr Features features = config.features;
  const tile::Sequence sequence = tile::make_sequence<features>(args, item.batch_idx);
  const int packed = item.first_row() + mla_block_q / 4 * warp + lane / 2;
  if (packed >= item.end_row(sequence.rows_q * config.group)) return;
  const int head_idx = item.kv_head_idx * config.group + packed % config.group;
  const auto Q = tile::query_rows<const ptx::Element<features.dtype>, features>(args.Q, sequence, head_idx);
  const auto* row = Q.row(packed / config.group);
  for (int column = lane % 2 * 64; column < config.head_dim; column += 128) ptx::prefetch_L2(row + column);
}

// If no KV block crosses the end of a page (config.producer_warp). Each warp fills one part of the value in both stages; the
// key's own columns come with the part that is released together with P. One lane loads a part with TMA if all its keys are
// seen; otherwise, at the ends of a sequence, the warp copies it and waits until it has landed.

template <ForwardConfig config>
struct BoxProducer {
  static constexpr Features features = config.features;
  using Element = ptx::Element<features.dtype>;

  const AttentionArgs& args;
  SharedStorage<config>& shared;
  int lane = threadIdx.x % 32;
  int warp = ptx::shuffle(static_cast<int>(threadIdx.x) / 32 % 4, 0);  // the compiler knows: uniform
  int batch = 0;  // of the next KV block: its page, or its sequence
  int row = 0;    // of its first key, there

  __device__ __forceinline__ void look_up(const decode::Cursor<config>& next) {
    const int begin = next.tile * mla_block_kv;
    if constexpr (features.paged) {
      if (begin + mla_block_kv <= next.item.seen.begin || begin >= next.item.seen.end) return;  // no key is read
      const int entry = args.page_table[next.item.batch_idx * args.page_table_stride + begin / args.page_size];
      batch = tile::max(0, tile::min(entry, args.num_pages - 1));  // as tile::PagedRows
      row = begin % args.page_size;
    } else {
      batch = features.packed ? 0 : next.item.batch_idx;
      row = begin + (features.packed ? static_cast<int>(args.cu_seqlens_kv[next.item.batch_idx]) : 0);
    }
  }

  /// Whether some row of the item sees each key of the tile.
  __device__ __forceinline__ static bool sees_all(const decode::Cursor<config>& now) {
    const int begin = now.tile * mla_block_kv;
    return begin >= now.item.seen.begin && begin + mla_block_kv <= now.item.seen.end;
  }

  /// The warp that loads the key's own columns of a stage: the one whose part is released together with P, which was there.
  __device__ __forceinline__ static constexpr int owner_of_own(int stage) { return stage == 0 ? 3 : 1; }

  /// Loads this warp's part of a stage with TMA, which completes the barriers itself.
  __device__ __forceinline__ void load_boxes(const decode::Cursor<config>& now, int stage, bool with_own) const {
    if (lane == 0) {
      ptx::path<"decode/mla_sm90 boxes">();
      const int first = warp * panels_of_part;
      ptx::mbarrier_arrive_expect_tx(shared.full[stage][warp], panels_of_part * StageTile::panel_bytes);
      ptx::tma_load_5d(shared.stage[stage].bytes + first * StageTile::panel_bytes, args.maps[map_values],
                       shared.full[stage][warp], 0, row, first, now.item.kv_head_idx, batch);
      if (with_own) {
        ptx::mbarrier_arrive_expect_tx(shared.full[stage][own_part], StageTile::panel_bytes);
        ptx::tma_load_4d(shared.stage[stage].bytes + value_panels * StageTile::panel_bytes, args.maps[map_own],
                         shared.full[stage][own_part], 0, row, now.item.kv_head_idx, batch);
      }
    }
    __syncwarp();  // no lane goes on before lane 0 has issued
  }

  /// Copies panels of the stage, beginning with `first`, from `column` of a tensor's rows on, and waits for them. Eight lanes
  /// copy 128 bytes of a row at a time.
  template <int panels>
  __device__ __forceinline__ void copy(const decode::Cursor<config>& now, const TensorView& view, int stage, int first,
                                       int column, int part) const {
    const int chunk = lane % 8;
    const bool has_columns = panels == panels_of_part || 8 * chunk < config.head_dim - config.head_dim_v;
    const auto* data = static_cast<const Element*>(view.data);
    const auto* base = data + now.item.kv_head_idx * view.head_stride + batch * view.batch_stride + column + chunk * 8;
#pragma unroll 1
    for (int r = lane / 8; r < mla_block_kv; r += 4) {
      const int j = now.tile * mla_block_kv + r;
      const bool reads = j >= now.item.seen.begin && j < now.item.seen.end && has_columns;
#pragma unroll
      for (int panel = 0; panel < panels; ++panel) {
        ptx::copy_async(ptx::shared_address(&shared.stage[stage]) + StageTile::offset(r, 8 * (first + panel) + chunk),
                        reads ? base + (row + r) * view.seq_stride + panel * 64 : data, reads ? 16 : 0);
      }
    }
    ptx::copy_async_commit();
    ptx::copy_async_wait<0>();
    ptx::fence_async_shared();  // orders the copies before the products' reads
    __syncwarp();               // every lane's copies have landed
    if (lane == 0) ptx::mbarrier_arrive(shared.full[stage][part]);
  }

  __device__ __forceinline__ void run() {
    const int count = shared.run.end - shared.run.begin;
    decode::Cursor<config> cursor = shared.run.start;
    StageOfBlock at;
#pragma unroll 1
    for (int n = 0; n < count; ++n) {
      const int stage = at.stage;
      const bool with_own = has_own_columns<config> && warp == owner_of_own(stage);
      look_up(cursor);
      ptx::mbarrier_wait(shared.empty[stage][warp / 2], at.parity() ^ 1);
      __syncwarp();  // all lanes have seen it: what lane 0 loads now is soon released, and the parity changes again
      if (sees_all(cursor)) {
        load_boxes(cursor, stage, with_own);
      } else {
        copy<panels_of_part>(cursor, args.V, stage, warp * panels_of_part, warp * panels_of_part * 64, warp);
        if (with_own) copy<1>(cursor, args.K, stage, value_panels, 0, own_part);
      }
      const bool ends_item = cursor.tile + 1 == cursor.item.end_tile;
      at.advance(ends_item);
      if (n + 1 == count) return;
      cursor.next(args);
      if (ends_item) prefetch_Q<config>(args, cursor.item, warp, lane);
    }
  }
};

// If rows are gathered: over lists, small pages, or strides that TMA does not take. All threads copy each part. A warp has 16
// rows of every KV block, a lane 16 bytes of four of them at a time; it computes the places of its rows once a KV block, then
// copies differ by constants. The copies signal by themselves that they have landed, so nobody waits before the next.

template <ForwardConfig config>
struct GatherProducer {
  static constexpr Features features = config.features;
  static constexpr int each = 4;          // rows of a lane
  static constexpr int rows_of_warp = 16;
  using Element = ptx::Element<features.dtype>;

  const AttentionArgs& args;
  SharedStorage<config>& shared;
  int lane = threadIdx.x % 32;
  int warp = ptx::shuffle(static_cast<int>(threadIdx.x) / 32 % 4, 0);  // the compiler knows: uniform
  int page = 0;  // of row `lane` % 16 of this warp
  int row = -1;  // within its page, or its sequence; -1: it is not read

  __device__ __forceinline__ void look_up(const decode::Cursor<config>& next) {
    const int place = next.tile * mla_block_kv + rows_of_warp * warp + lane % rows_of_warp;
    int key = place >= next.item.seen.begin && place < next.item.seen.end ? place : -1;
    if constexpr (features.key_list) {
      const tile::Sequence sequence = tile::make_sequence<features>(args, next.item.batch_idx);
      const int query = next.item.row_tile / decode::Item<config>::query_tiles;
      const tile::KeyListView list(args, sequence, features.packed, query,
                                   args.list_heads > 1 ? next.item.kv_head_idx : 0);
      key = place < list.count ? list.template entry<false>(place, sequence.visible_kv) : -1;
    }
    row = key;
    if constexpr (features.paged) {
      if (key < 0) return;
      const int entry = args.page_table[next.item.batch_idx * args.page_table_stride + key / args.page_size];
      page = tile::max(0, tile::min(entry, args.num_pages - 1));  // as tile::PagedRows
      row = key % args.page_size;
    }
  }

  /// Where this lane reads its rows of a tensor.
  struct Places {
    const Element* from[each];
  };
  __device__ __forceinline__ Places find(const decode::Cursor<config>& now, const TensorView& view) const {
    const auto* base = static_cast<const Element*>(view.data) + now.item.kv_head_idx * view.head_stride + lane % 8 * 8;
    if constexpr (!features.paged) {
      const long long start = features.packed ? args.cu_seqlens_kv[now.item.batch_idx] : 0;
      base += now.item.batch_idx * view.batch_stride + start * view.seq_stride;
    }
    Places places;
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const int source = 4 * i + lane / 8, of_row = ptx::shuffle(row, source);
      long long offset = of_row * view.seq_stride;
      if constexpr (features.paged) offset += ptx::shuffle(page, source) * view.batch_stride;
      places.from[i] = of_row < 0 ? static_cast<const Element*>(view.data) : base + offset;
    }
    return places;
  }

  /// Copies a part; it signals by itself that it has landed.
  template <int panels>
  __device__ __forceinline__ void copy(const Places& places, const bool (&exists)[each], int stage, int first_panel,
                                       ptx::Mbarrier& full) const {
    const bool has_columns = panels == panels_of_part || 8 * (lane % 8) < config.head_dim - config.head_dim_v;
    const unsigned to = ptx::shared_address(&shared.stage[stage]) + first_panel * StageTile::panel_bytes;
    const int column = panels == panels_of_part ? first_panel * 64 : 0;
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const unsigned at = to + StageTile::offset(rows_of_warp * warp + 4 * i + lane / 8, lane % 8);
#pragma unroll
      for (int panel = 0; panel < panels; ++panel) {
        const bool reads = exists[i] && has_columns;
        ptx::copy_async(at + panel * StageTile::panel_bytes, places.from[i] + (reads ? column + panel * 64 : 0), reads ? 16 : 0);
      }
    }
    ptx::copy_async_arrive(full);
  }

  __device__ __forceinline__ void run() {
    const int count = shared.run.end - shared.run.begin;
    decode::Cursor<config> cursor = shared.run.start;
    StageOfBlock at;
    look_up(cursor);
#pragma unroll 1
    for (int n = 0; n < count; ++n) {
      const int stage = at.stage, room = at.parity() ^ 1;
      const Places values = find(cursor, args.V);
      bool exists[each];
#pragma unroll
      for (int i = 0; i < each; ++i) exists[i] = ptx::shuffle(row, 4 * i + lane / 8) >= 0;
      const unsigned marks = ptx::ballot(row >= 0);
      auto& full = shared.full[stage];
      const auto fill = [&](int part) {
        if (part % 2 == 0) ptx::mbarrier_wait(shared.empty[stage][part / 2], room);
        if (features.key_list && part == 2 * stage) {  // the warpgroup of the stage has read the marks before
          if (lane == 0) {
            shared.listed[stage][warp] = static_cast<unsigned short>(marks);
            ptx::mbarrier_arrive(shared.marked[stage]);
          }
        }
        copy<panels_of_part>(values, exists, stage, part * panels_of_part, full[part]);
      };
#pragma unroll
      for (int part = 0; part < value_parts; ++part) fill(part);
      // Both warpgroups have read P, which was where the key's own columns go.
      if constexpr (has_own_columns<config>) copy<1>(find(cursor, args.K), exists, stage, value_panels, full[own_part]);
      const bool ends_item = cursor.tile + 1 == cursor.item.end_tile;
      at.advance(ends_item);
      if (n + 1 < count) {
        cursor.next(args);
        look_up(cursor);
        if (ends_item) prefetch_Q<config>(args, cursor.item, warp, lane);
      }
    }
  }
};

// The producer warpgroup for latent keys of 8 bits. The codes of a part are copied to the second half of its memory, and
// are converted in place to 16-bit elements:
//
//   part of four panels, blocks of 4 KiB:   0 1 | 2 3 | 4 5 | 6 7       codes of panels 3, 2, 1, 0 in blocks 4, 5, 6, 7
//   first:  panels 0 and 1, 7 6 -> 0 1 2 3                              there are no codes
//   then:   panels 2 and 3, 5 4 -> 4 5 6 7                              when all four warps have read theirs
//
// A warp copies and converts 16 rows of every KV block, so a block is ready four times as soon as if each warp had a block
// of its own. The copies of the next block are issued between the parts of the current one, as soon as there is room.

constexpr int barrier_codes = 6;  // the warps that load

template <ForwardConfig config>
struct CodeProducer {
  static constexpr Features features = config.features;
  // The values are converted in two halves, each of two parts of the stage.
  static constexpr int most = 3, parts = has_own_columns<config> ? most : 2;
  static constexpr int own_columns = config.head_dim - config.head_dim_v;
  static constexpr Type code = key_type(features);
  static constexpr Type type = product_type<config>;
  static constexpr int block_bytes = mla_block_kv * 64;
  static constexpr int unit_bytes = 16;  // copied by a lane at once
  static constexpr int rows = mla_block_kv / 4;
  using Element = tile::Stored<code>;
  using Unit = ptx::Vector<unsigned, 4>;

  const AttentionArgs& args;
  SharedStorage<config>& shared;
  int lane = threadIdx.x % 32;
  int first_row = static_cast<int>(threadIdx.x) / 32 % 4 * rows;  // of this warp
  int page = 0;                                                   // of row `lane` % 16 of the next KV block
  int page_row = 0;

  __device__ __forceinline__ static bool sees(const decode::Item<config>& item, int j) {
    return j >= item.seen.begin && j < item.seen.end;
  }

  __device__ __forceinline__ void look_up(const decode::Cursor<config>& next) {
    if constexpr (features.paged) {
      const int j = next.tile * mla_block_kv + first_row + lane % rows;
      if (!sees(next.item, j)) return;
      const int entry = args.page_table[next.item.batch_idx * args.page_table_stride + j / args.page_size];
      page = tile::max(0, tile::min(entry, args.num_pages - 1));  // as tile::PagedRows
      page_row = j % args.page_size;
    }
  }

  /// Prefetches this warp's rows of the KV block that was looked up last into L2, because their copies cannot begin before
  /// there is room.
  __device__ __forceinline__ void prefetch(const decode::Cursor<config>& next) const {
    const int j = next.tile * mla_block_kv + first_row + lane % rows;
    if (!sees(next.item, j)) return;
#pragma unroll
    for (int i = 0; i < parts; ++i) {
      // Lines of 128 bytes: five of the values and the key's own columns, or four of the values.
      const int line = 2 * i + lane / rows;
      const bool of_values = parts < most || line < 5;
      const TensorView& view = of_values ? args.V : args.K;
      const auto* from = static_cast<const Element*>(view.data) + next.item.kv_head_idx * view.head_stride;
      if constexpr (features.paged) {
        from += page * view.batch_stride + page_row * view.seq_stride;
      } else {
        const long long start = features.packed ? args.cu_seqlens_kv[next.item.batch_idx] : 0;
        from += next.item.batch_idx * view.batch_stride + (start + j) * view.seq_stride;
      }
      ptx::prefetch_L2(from + (of_values ? tile::min(128 * line, mla_head_dim_v - 1) : 0));
    }
  }

  __device__ __forceinline__ unsigned part_smem(int stage, int part) const {
    return ptx::shared_address(&shared.stage[stage]) + part * panels_of_half * StageTile::panel_bytes;
  }

  /// The place of this lane's unit of a row's codes of a panel, in a part of `panels` panels. Four lanes have the 64 bytes
  /// of a row.
  template <int panels>
  __device__ __forceinline__ unsigned offset(int row, int panel) const {
    return static_cast<unsigned>((2 * panels - 1 - panel) * block_bytes + row * 64 + lane % 4 * unit_bytes);
  }
  /// The two rows of a lane.
  __device__ __forceinline__ int row_of(int half) const { return first_row + 8 * half + lane / 4; }

  /// The address of this lane's unit of the first panel of a row, in a tensor.
  __device__ __forceinline__ const Element* source(const decode::Cursor<config>& now, const TensorView& view,
                                                   int half) const {
    const auto* from = static_cast<const Element*>(view.data) + now.item.kv_head_idx * view.head_stride;
    if constexpr (features.paged) {
      from += ptx::shuffle(page, 8 * half + lane / 4) * view.batch_stride +
              ptx::shuffle(page_row, 8 * half + lane / 4) * view.seq_stride;
    } else {
      const long long start = features.packed ? args.cu_seqlens_kv[now.item.batch_idx] : 0;
      from += now.item.batch_idx * view.batch_stride + (start + now.tile * mla_block_kv + row_of(half)) * view.seq_stride;
    }
    return from + lane % 4 * unit_bytes;
  }

  /// Copies this warp's rows of a KV block, in a group for each part. A row's address is computed once; the copies then
  /// differ by constants.
  __device__ __forceinline__ void copy_block(const decode::Cursor<config>& now, int stage) const {
    const Element* from[2];
    int bytes[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      from[half] = source(now, args.V, half);
      bytes[half] = sees(now.item, now.tile * mla_block_kv + row_of(half)) ? unit_bytes : 0;
      if (bytes[half] == 0) from[half] = static_cast<const Element*>(args.V.data);
    }
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int i = 0; i < 2 * panels_of_half; ++i) {
        const int panel = i / 2, half = i % 2;
        ptx::copy_async(part_smem(stage, part) + offset<panels_of_half>(row_of(half), panel),
                        from[half] + (part * panels_of_half + panel) * 64, bytes[half]);
      }
      ptx::copy_async_commit();
    }
    if constexpr (parts == most) {
      const bool has_columns = lane % 4 * unit_bytes < own_columns;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Element* own = source(now, args.K, half);
        if (bytes[half] == 0 || !has_columns) own = static_cast<const Element*>(args.K.data);
        ptx::copy_async(part_smem(stage, 2) + offset<1>(row_of(half), 0), own, has_columns ? bytes[half] : 0);
      }
      ptx::copy_async_commit();
    }
  }

  /// Reads the codes of this warp's rows of `count` panels, beginning with `first`, which is even: two units of a panel a
  /// lane.
  template <int panels, int count>
  __device__ __forceinline__ void read(Unit (&codes)[2 * count], unsigned from, int first) const {
#pragma unroll
    for (int i = 0; i < 2 * count; ++i) {
      codes[i] =
          ptx::load_shared<Unit>(from + offset<panels>(row_of(i % 2), i / 2) - static_cast<unsigned>(first * block_bytes));
    }
  }
  template <int count>
  __device__ __forceinline__ void write(const Unit (&codes)[2 * count], unsigned to) const {
    write_as<count>(codes, to, [](unsigned four) { return tile::to_pairs<code, type>(four); });
  }
  template <int count, class ToPairs>
  __device__ __forceinline__ void write_as(const Unit (&codes)[2 * count], unsigned to, const ToPairs& to_pairs) const {
#pragma unroll
    for (int i = 0; i < 2 * count; ++i) {
      const int row = row_of(i % 2);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const tile::TwoPairs low = to_pairs(codes[i][2 * half]), high = to_pairs(codes[i][2 * half + 1]);
        ptx::store_shared(to + i / 2 * StageTile::panel_bytes + StageTile::offset(row, lane % 4 * 2 + half),
                          Unit{{low.first, low.second, high.first, high.second}});
      }
    }
  }

  /// Converts the codes of `panels` panels of a part, one half after the other. Both halves use the same instructions,
  /// because the code of these warps competes with the consumers' for the instruction cache.
  template <int panels>
  __device__ __forceinline__ void expand(unsigned part) const {
    constexpr int count = panels == 4 ? 2 : 1;
#pragma unroll 1
    for (int first = 0; first < panels; first += count) {
      Unit codes[2 * count];
      read<panels, count>(codes, part, first);
      // All codes of the part have been read. Before the first half no barrier is needed: panels 0 and 1 of four do not
      // overlap codes.
      if (first + count == panels) ptx::barrier_sync(barrier_codes, wg_threads);
      write<count>(codes, part + static_cast<unsigned>(first * StageTile::panel_bytes));
    }
  }

  /// Waits for this warp's copies of a part, but not for the parts after it, nor for those of the next KV block if they
  /// have been issued (ahead).
  __device__ __forceinline__ static void wait_for(int part, bool ahead) {
    constexpr int last = parts - 1;
    if (part == 0) ahead ? ptx::copy_async_wait<last + parts>() : ptx::copy_async_wait<last>();
    if (part == 1) ahead ? ptx::copy_async_wait<last + parts - 1>() : ptx::copy_async_wait<last - 1>();
    if (part == 2) ahead ? ptx::copy_async_wait<parts>() : ptx::copy_async_wait<0>();
    __syncwarp();  // every lane's copies have landed
  }
  /// Converts the codes of a part, and signals that it is ready.
  template <int panels>
  __device__ __forceinline__ void finish(int stage, int part) const {
    expand<panels>(part_smem(stage, part));
    ptx::fence_async_shared();  // the products read it
    __syncwarp();               // every lane has written
    if (lane != 0) return;
    if constexpr (panels == panels_of_half) {
      ptx::mbarrier_arrive(shared.full[stage][2 * part]);
      ptx::mbarrier_arrive(shared.full[stage][2 * part + 1]);
    } else {
      ptx::mbarrier_arrive(shared.full[stage][own_part]);
    }
  }

  __device__ __forceinline__ bool has_room(const StageOfBlock& at) const {
    bool all = true;
    for (auto& empty : shared.empty[at.stage]) all = all && ptx::mbarrier_test(empty, at.parity() ^ 1);
    const bool room = ptx::shuffle(static_cast<int>(all), 0) != 0;
    __syncwarp();  // another lane may have tested a moment earlier: its copies must also come after what lane 0 has seen
    return room;
  }

  __device__ __forceinline__ void run() {
    const int count = shared.run.end - shared.run.begin;
    decode::Cursor<config> cursor = shared.run.start;
    StageOfBlock at;  // of the block whose copies are issued next
    const auto issue = [&](int n) {
      copy_block(cursor, at.stage);
      at.advance(cursor.tile + 1 == cursor.item.end_tile);
      if (n + 1 == count) return;
      cursor.next(args);
      look_up(cursor);
    };
    look_up(cursor);
    int stage = 0;  // of block n
    issue(0);
    int issued = 1, fetched = 0;  // KV blocks
    const auto prefetch_next = [&] {
      if (fetched == issued || issued == count) return;
      fetched = issued;
      prefetch(cursor);
    };
#pragma unroll 1
    for (int n = 0; n < count; ++n) {
      const int next_stage = at.stage;  // unless the copies of block n + 1 have been issued
      bool ahead = n + 1 == count;  // the copies of block n + 1 have been issued, or it does not exist
      bool issued_now = false;      // in this iteration
      const auto issue_next = [&](bool wait) {
        if (ahead || (!wait && !has_room(at))) return;
        if (wait) {
          for (auto& empty : shared.empty[at.stage]) ptx::mbarrier_wait(empty, at.parity() ^ 1);
        }
        issue(n + 1);
        ahead = issued_now = true, ++issued;
      };
#pragma unroll 1
      for (int part = 0; part < 2; ++part) {
        issue_next(false);
        wait_for(part, issued_now);
        finish<panels_of_half>(stage, part);
        prefetch_next();
      }
      if constexpr (parts == most) {
        issue_next(false);
        wait_for(2, issued_now);
        finish<1>(stage, 2);
        prefetch_next();
      }
      issue_next(true);
      stage = next_stage;
    }
  }
};

}  // namespace flash_attention::mla
