#pragma once

// The producer warpgroup of decode/mla_sm90. It loads latent keys through the page table with cp.async, 16 bytes a lane. A
// stage is filled in three parts, each with a separate barrier. So products begin before the whole stage has landed, and a
// part is filled again as soon as the warpgroup that reads it is done. Warps 0 and 1 fill stage 0, warps 2 and 3 stage 1.
// Each warp copies half of the value's columns; the second warp of a stage also copies the key's own columns. So a warp
// waits only for its own copies, and sees every phase of the barriers that it waits for. Keys that no row of the item sees
// become zero without being read.
//
// A lane looks up the pages of two rows of the next KV block while the copies of the current one are in flight.
//
// If pages are multiples of KV blocks (config.producer_warp), one lane loads a part with TMA if all its keys are seen.

#include "abi/tensor_maps.h"
#include "decode/mla_sm90/storage.cuh"
#include "ptx/async.cuh"
#include "ptx/tma.cuh"
#include "tile/key_list.cuh"
#include "tile/narrow_pairs.cuh"

namespace flash_attention::mla {

using namespace abi::mla_maps;

template <ForwardConfig config>
struct Producer {
  static constexpr Features features = config.features;
  static constexpr bool has_own = parts_of_stage<config> == most_parts;  // columns of the key that are not of its value
  using Element = ptx::Element<features.dtype>;

  const AttentionArgs& args;
  SharedStorage<config>& shared;
  int lane = threadIdx.x % 32;
  int page[2] = {};  // of rows `lane` and `lane` + 32 of the next part
  int page_row[2] = {};
  int listed[2] = {};  // with lists: the keys of these rows; -1: none

  __device__ __forceinline__ static bool sees(const decode::Item<config>& item, int j) {
    return j >= item.seen.begin && j < item.seen.end;
  }

  /// The keys that a list names, and their pages.
  __device__ __forceinline__ void look_up_list(const decode::Cursor<config>& next) {
    const tile::Sequence sequence = tile::make_sequence<features>(args, next.item.batch_idx);
    const int query = next.item.row_tile / decode::Item<config>::query_tiles;
    const tile::KeyListView list(args, sequence, features.packed, query, args.list_heads > 1 ? next.item.kv_head_idx : 0);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int place = next.tile * mla_block_kv + lane + 32 * half;
      const int key = place < list.count ? list.template entry<false>(place, sequence.visible_kv) : -1;
      listed[half] = key;
      page_row[half] = key;
      if constexpr (features.paged) {
        if (key < 0) continue;
        const int entry = args.page_table[next.item.batch_idx * args.page_table_stride + key / args.page_size];
        page[half] = tile::max(0, tile::min(entry, args.num_pages - 1));  // as tile::PagedRows
        page_row[half] = key % args.page_size;
      }
    }
  }

  /// Tells the scores which entries of the stage are keys. Only by the warp that waits for the warpgroup of that stage,
  /// which reads it.
  __device__ __forceinline__ void mark_listed(int stage) const {
    const unsigned low = ptx::ballot(listed[0] >= 0), high = ptx::ballot(listed[1] >= 0);
    if (lane == 0) shared.listed[stage][0] = low, shared.listed[stage][1] = high;
  }

  __device__ __forceinline__ void look_up(const decode::Cursor<config>& next) {
    if constexpr (features.key_list) return look_up_list(next);
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

  /// The coordinates of a tile's boxes, from its first key. Valid in lane 0.
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

  /// Loads this warp's parts of a stage with TMA, which completes the barriers itself.
  __device__ __forceinline__ void load_boxes(const decode::Cursor<config>& now, int stage, int half, int room) const {
    if (lane == 0) {
      ptx::path<"decode/mla_sm90 boxes">();
      const BoxPlace at = box_place(now);
      ptx::mbarrier_arrive_expect_tx(shared.full[stage][half], panels_of_half * StageTile::panel_bytes);
      ptx::tma_load_5d(shared.stage[stage].bytes + half * panels_of_half * StageTile::panel_bytes, args.maps[map_values],
                       shared.full[stage][half], 0, at.row, half * panels_of_half, now.item.kv_head_idx, at.batch);
      if (half == 1 && has_own) {
        ptx::mbarrier_wait(shared.empty[stage][0], room);  // both warpgroups have read P, which was here
        ptx::mbarrier_arrive_expect_tx(shared.full[stage][2], StageTile::panel_bytes);
        ptx::tma_load_4d(shared.stage[stage].bytes + value_panels * StageTile::panel_bytes, args.maps[map_own],
                         shared.full[stage][2], 0, at.row, now.item.kv_head_idx, at.batch);
      }
    }
    __syncwarp();  // no lane goes on before lane 0 has waited
  }

  __device__ __forceinline__ unsigned part_smem(int stage, int first_panel) const {
    return ptx::shared_address(&shared.stage[stage]) + first_panel * StageTile::panel_bytes;
  }

  /// Copies panels [first, first + panels) of the stage, beginning with `column` of a tensor's rows. Eight lanes copy 128
  /// bytes of a row, one panel after another.
  template <int first, int panels>
  __device__ __forceinline__ void copy(const decode::Cursor<config>& now, const TensorView& view, int stage, int column) {
    constexpr int lanes = 8;  // of a row
    const int chunk = lane % lanes;
    const bool has_columns = first < value_panels || 8 * chunk < config.head_dim - config.head_dim_v;
    const auto* base =
        static_cast<const Element*>(view.data) + now.item.kv_head_idx * view.head_stride + column + chunk * 8;
    if constexpr (!features.paged) {
      const long long start = features.packed ? args.cu_seqlens_kv[now.item.batch_idx] : 0;
      base += now.item.batch_idx * view.batch_stride + start * view.seq_stride;
    }
    const unsigned to = part_smem(stage, first);
    constexpr int together =
        config.producer_warp ? 1 : 4;  // with boxes, only the last KV block of a sequence is copied here
#pragma unroll together
    for (int begin = 0; begin < mla_block_kv; begin += 32 / lanes) {
      const int row = begin + lane / lanes, j = now.tile * mla_block_kv + row;
      long long offset = j * view.seq_stride;
      bool exists = sees(now.item, j);
      if constexpr (features.key_list) {
        const int key = ptx::shuffle(begin < 32 ? listed[0] : listed[1], row % 32);
        exists = key >= 0;
        offset = key * view.seq_stride;
      }
      if constexpr (features.paged) {
        offset = ptx::shuffle(begin < 32 ? page[0] : page[1], row % 32) * view.batch_stride +
                 ptx::shuffle(begin < 32 ? page_row[0] : page_row[1], row % 32) * view.seq_stride;
      }
      exists = exists && has_columns;
      const Element* from = exists ? base + offset : static_cast<const Element*>(view.data);
#pragma unroll
      for (int panel = 0; panel < panels; ++panel) {
        ptx::copy_async(to + StageTile::offset(row, chunk) + panel * StageTile::panel_bytes, from + panel * 64,
                        exists ? 16 : 0);
      }
    }
    ptx::copy_async_commit();
  }

  /// Signals that the copies of a part have landed.
  __device__ __forceinline__ void signal(int stage, int part) const {
    ptx::fence_async_shared();  // orders the copies before the products' reads
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
      if constexpr (features.key_list) {
        if (half == stage) mark_listed(stage);
      }
      const bool in_boxes = config.producer_warp && sees_all(cursor);
      if (in_boxes) {
        load_boxes(cursor, stage, half, room);
      } else if (half == 0) {
        copy<0, panels_of_half>(cursor, args.V, stage, 0);
      } else {
        copy<panels_of_half, panels_of_half>(cursor, args.V, stage, panels_of_half * 64);
        if constexpr (has_own) {
          ptx::mbarrier_wait(shared.empty[stage][0], room);  // both warpgroups have read P, which was here
          copy<value_panels, 1>(cursor, args.K, stage, 0);
        }
      }
      for (int step = 1; step <= mla_stages && n + step < count; ++step) cursor.next(args);
      if (n + mla_stages < count) look_up(cursor);
      if (in_boxes) continue;
      if (half == 0) {
        ptx::copy_async_wait<0>();
        signal(stage, 0);
      } else {
        ptx::copy_async_wait<has_own ? 1 : 0>();
        signal(stage, 1);
        if constexpr (has_own) {
          ptx::copy_async_wait<0>();
          signal(stage, 2);
        }
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
  static constexpr int parts = parts_of_stage<config>, own_columns = config.head_dim - config.head_dim_v;
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
      const bool of_values = parts < most_parts || line < 5;
      const TensorView& view = of_values ? args.V : args.K;
      const auto* from = static_cast<const Element*>(view.data) + next.item.kv_head_idx * view.head_stride;
      if constexpr (features.paged) {
        from += page * view.batch_stride + page_row * view.seq_stride;
      } else {
        const long long start = features.packed ? args.cu_seqlens_kv[next.item.batch_idx] : 0;
        from += next.item.batch_idx * view.batch_stride + (start + j) * view.seq_stride;
      }
      ptx::prefetch_l2(from + (of_values ? tile::min(128 * line, mla_head_dim_v - 1) : 0));
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
    if constexpr (parts == most_parts) {
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
    if (lane == 0) ptx::mbarrier_arrive(shared.full[stage][part]);
  }

  __device__ __forceinline__ bool has_room(int n) const {
    const int stage = n % mla_stages, phase = n / mla_stages % 2 ^ 1;
    const bool both =
        ptx::mbarrier_test(shared.empty[stage][0], phase) && ptx::mbarrier_test(shared.empty[stage][1], phase);
    const bool room = ptx::shuffle(static_cast<int>(both), 0) != 0;
    __syncwarp();  // another lane may have tested a moment earlier: its copies must also come after what lane 0 has seen
    return room;
  }

  __device__ __forceinline__ void run() {
    const int count = shared.run.end - shared.run.begin;
    decode::Cursor<config> cursor = shared.run.start;
    const auto issue = [&](int n) {
      copy_block(cursor, n % mla_stages);
      if (n + 1 == count) return;
      cursor.next(args);
      look_up(cursor);
    };
    look_up(cursor);
    issue(0);
    int issued = 1, fetched = 0;  // KV blocks
    const auto prefetch_next = [&] {
      if (fetched == issued || issued == count) return;
      fetched = issued;
      prefetch(cursor);
    };
#pragma unroll 1
    for (int n = 0; n < count; ++n) {
      const int stage = n % mla_stages;
      bool ahead = n + 1 == count;  // the copies of block n + 1 have been issued, or it does not exist
      bool issued_now = false;      // in this iteration
      const auto issue_next = [&](bool wait) {
        if (ahead || (!wait && !has_room(n + 1))) return;
        if (wait) {
          for (auto& empty : shared.empty[stage ^ 1]) ptx::mbarrier_wait(empty, (n + 1) / mla_stages % 2 ^ 1);
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
      if constexpr (parts == most_parts) {
        issue_next(false);
        wait_for(2, issued_now);
        finish<1>(stage, 2);
        prefetch_next();
      }
      issue_next(true);
    }
  }
};

}  // namespace flash_attention::mla
