#pragma once

#include "decode/mla_storage.cuh"
#include "ptx/async.cuh"
#include "tile/narrow_pairs.cuh"

// Latent keys of 8 bits in decode/mla_sm90, and the warpgroup that loads them. The codes of a part are copied into the
// second half of its memory and become 16-bit elements there:
//
//   part of four panels, blocks of 4 KiB:   0 1 | 2 3 | 4 5 | 6 7       codes of panels 3, 2, 1, 0 in blocks 4, 5, 6, 7
//   first:  panels 0 and 1, 7 6 -> 0 1 2 3                              there are no codes
//   then:   panels 2 and 3, 5 4 -> 4 5 6 7                              when all four warps have read theirs
//
// A warp copies and converts 16 rows of every KV block: a block is ready four times as soon as if each warp had its own.
// The copies of the next block are issued between the parts of the present one, as soon as there is room.

namespace flash_attention::mla {

constexpr int barrier_codes = 6;  // the warps that load

template <ForwardConfig config>
struct CodeProducer {
  static constexpr Features features = config.features;
  static constexpr Type code = key_type(features);
  static constexpr Type type = features.dtype;
  static constexpr int block_bytes = mla_block_kv * 64;
  static constexpr int unit_bytes = 16;  // that a lane copies at once
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

  __device__ __forceinline__ unsigned part_smem(int stage, int part) const {
    return ptx::shared_address(&shared.stage[stage]) + part * panels_of_half * StageTile::panel_bytes;
  }

  /// Where unit `unit` of the codes of a row of `panels` panels is in their part. Odd panels change the rows of a pair, so
  /// that lanes that copy two panels of a row meet other banks.
  template <int panels>
  __device__ __forceinline__ static unsigned offset(int row, int unit) {
    const int panel = unit / 4;
    return static_cast<unsigned>((2 * panels - 1 - panel) * block_bytes + (row ^ (panel & 1)) * 64 + unit % 4 * unit_bytes);
  }

  /// This warp's rows of a part, from `column` of a tensor's rows on: one group of copies.
  template <int panels>
  __device__ __forceinline__ void copy(const decode::Cursor<config>& now, const TensorView& view, unsigned to,
                                       int column) const {
    constexpr int lanes = 4 * panels;  // of a row
    const int unit = lane % lanes;
    const auto* base =
        static_cast<const Element*>(view.data) + now.item.kv_head_idx * view.head_stride + column + unit * unit_bytes;
    if constexpr (!features.paged) {
      const long long start = features.packed ? args.cu_seqlens_kv[now.item.batch_idx] : 0;
      base += now.item.batch_idx * view.batch_stride + start * view.seq_stride;
    }
#pragma unroll 2
    for (int begin = 0; begin < rows; begin += 32 / lanes) {
      const int row = begin + lane / lanes, j = now.tile * mla_block_kv + first_row + row;
      long long from = j * view.seq_stride;
      if constexpr (features.paged)
        from = ptx::shuffle(page, row) * view.batch_stride + ptx::shuffle(page_row, row) * view.seq_stride;
      const bool exists = sees(now.item, j);
      ptx::copy_async(to + offset<panels>(first_row + row, unit), base + (exists ? from : 0), exists ? unit_bytes : 0);
    }
    ptx::copy_async_commit();
  }
  __device__ __forceinline__ void copy_block(const decode::Cursor<config>& now, int stage) const {
    copy<panels_of_half>(now, args.V, part_smem(stage, 0), 0);
    copy<panels_of_half>(now, args.V, part_smem(stage, 1), panels_of_half * 64);
    copy<1>(now, args.K, part_smem(stage, 2), 0);
  }

  /// This warp's rows of `count` panels: the codes of a lane, two units of a panel.
  template <int panels, int first, int count>
  __device__ __forceinline__ void read(Unit (&codes)[2 * count], unsigned from) const {
#pragma unroll
    for (int i = 0; i < 2 * count; ++i) {
      const int row = first_row + i % 2 * 8 + lane / 4;
      codes[i] = ptx::load_shared<Unit>(from + offset<panels>(row, 4 * (first + i / 2) + lane % 4));
    }
  }
  template <int first, int count>
  __device__ __forceinline__ void write(const Unit (&codes)[2 * count], unsigned to) const {
#pragma unroll
    for (int i = 0; i < 2 * count; ++i) {
      const int row = first_row + i % 2 * 8 + lane / 4;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const tile::TwoPairs low = tile::to_pairs<code, type>(codes[i][2 * half]);
        const tile::TwoPairs high = tile::to_pairs<code, type>(codes[i][2 * half + 1]);
        ptx::store_shared(to + (first + i / 2) * StageTile::panel_bytes + StageTile::offset(row, lane % 4 * 2 + half),
                          Unit{{low.first, low.second, high.first, high.second}});
      }
    }
  }

  /// The codes of a part become elements.
  template <int panels>
  __device__ __forceinline__ void expand(unsigned part) const {
    if constexpr (panels == 4) {
      Unit codes[4];
      read<panels, 0, 2>(codes, part);
      write<0, 2>(codes, part);
    }
    constexpr int count = panels == 4 ? 2 : 1, first = panels - count;
    Unit codes[2 * count];
    read<panels, first, count>(codes, part);
    ptx::barrier_sync(barrier_codes, wg_threads);  // all codes of the part have been read
    write<first, count>(codes, part);
  }

  /// This warp's copies of a part have landed, but for those of the `pending` groups after it: they become elements.
  template <int part, int pending>
  __device__ __forceinline__ void finish(int stage) const {
    ptx::copy_async_wait<pending>();
    __syncwarp();  // every lane's copies have landed
    expand<(part < 2 ? panels_of_half : 1)>(part_smem(stage, part));
    ptx::fence_async_shared();  // the products read it
    __syncwarp();               // every lane has written
    if (lane == 0) ptx::mbarrier_arrive(shared.full[stage][part]);
  }

  __device__ __forceinline__ bool has_room(int n) const {
    const int stage = n % mla_stages, phase = n / mla_stages % 2 ^ 1;
    const bool both =
        ptx::mbarrier_test(shared.empty[stage][0], phase) && ptx::mbarrier_test(shared.empty[stage][1], phase);
    const bool room = ptx::shuffle(static_cast<int>(both), 0) != 0;
    __syncwarp();  // another lane may have looked a moment earlier: what lane 0 has seen comes before its copies, too
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
#pragma unroll 1
    for (int n = 0; n < count; ++n) {
      const int stage = n % mla_stages;
      bool ahead = n + 1 == count;  // the copies of block n + 1 are issued, or there is none
      int groups = 0;               // of it
      const auto look_ahead = [&](bool wait) {
        if (ahead || (!wait && !has_room(n + 1))) return;
        if (wait) {
          for (auto& empty : shared.empty[stage ^ 1]) ptx::mbarrier_wait(empty, (n + 1) / mla_stages % 2 ^ 1);
        }
        issue(n + 1);
        ahead = true, groups = parts_of_stage;
      };
      look_ahead(false);
      groups == 0 ? finish<0, 2>(stage) : finish<0, 5>(stage);
      look_ahead(false);
      groups == 0 ? finish<1, 1>(stage) : finish<1, 4>(stage);
      look_ahead(false);
      groups == 0 ? finish<2, 0>(stage) : finish<2, 3>(stage);
      look_ahead(true);
    }
  }
};

}  // namespace flash_attention::mla
