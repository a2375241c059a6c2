#pragma once

#include "decode/mla_codes.cuh"
#include "ptx/async.cuh"

// The warpgroup of decode/mla_sm90 that loads: latent keys through the page table, by cp.async, 16 bytes a lane. A stage is
// filled in three parts, each with a separate barrier, so that products begin before all of it has landed, and a part
// is filled again as soon as the warpgroup that read it last is done. Warps 0 and 1 fill stage 0, the others stage 1; of
// the values each warp has one half, and the second of a stage the key's own columns, too. So a warp waits for its own
// copies alone, and sees every phase of the barriers that it waits for. Keys that no row of the item sees become zero
// without being read.
//
// A lane looks up the pages of two rows of the next KV block while the copies of the present one are in flight.

namespace flash_attention::mla {

template <ForwardConfig config>
struct Producer {
  static constexpr Features features = config.features;
  static constexpr Type code = key_type(features);
  static constexpr bool narrow = is_narrow(code);
  using Element = tile::Stored<code>;
  static constexpr int unit = 16 / sizeof(Element);  // elements that a lane copies at once

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

  __device__ __forceinline__ unsigned part_smem(int stage, int first_panel) const {
    return ptx::shared_address(&shared.stage[stage]) + first_panel * StageTile::panel_bytes;
  }

  /// Panels [first, first + panels) of the stage, from `column` of a tensor's rows on. Of 16-bit elements eight lanes copy
  /// 128 bytes of a row, a panel after the other; codes of a row are copied at once.
  template <int first, int panels>
  __device__ __forceinline__ void copy(const decode::Cursor<config>& now, const TensorView& view, int stage, int column) {
    constexpr int lanes = narrow ? 4 * panels : 8;  // of a row
    const int chunk = lane % lanes;
    const auto* base =
        static_cast<const Element*>(view.data) + now.item.kv_head_idx * view.head_stride + column + chunk * unit;
    if constexpr (!features.paged) {
      const long long start = features.packed ? args.cu_seqlens_kv[now.item.batch_idx] : 0;
      base += now.item.batch_idx * view.batch_stride + start * view.seq_stride;
    }
    const unsigned to = part_smem(stage, first);
#pragma unroll 4
    for (int begin = 0; begin < mla_block_kv; begin += 32 / lanes) {
      const int row = begin + lane / lanes, j = now.tile * mla_block_kv + row;
      long long offset = j * view.seq_stride;
      if constexpr (features.paged) {
        offset = ptx::shuffle(begin < 32 ? page[0] : page[1], row % 32) * view.batch_stride +
                 ptx::shuffle(begin < 32 ? page_row[0] : page_row[1], row % 32) * view.seq_stride;
      }
      const bool exists = sees(now.item, j);
      const Element* from = base + (exists ? offset : 0);
      if constexpr (narrow) {
        ptx::copy_async(to + Codes<code, features.dtype>::template offset<panels>(row, chunk), from, exists ? 16 : 0);
      } else {
#pragma unroll
        for (int panel = 0; panel < panels; ++panel) {
          ptx::copy_async(to + StageTile::offset(row, chunk) + panel * StageTile::panel_bytes, from + panel * 64,
                          exists ? 16 : 0);
        }
      }
    }
    ptx::copy_async_commit();
  }

  /// The copies of a part have landed.
  template <int first, int panels>
  __device__ __forceinline__ void signal(int stage, int part) const {
    if constexpr (narrow) {
      __syncwarp();  // every lane's copies have landed
      Codes<code, features.dtype>::template expand<panels>(part_smem(stage, first), lane);
    }
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
      if (half == 0) {
        copy<0, panels_of_half>(cursor, args.V, stage, 0);
      } else {
        copy<panels_of_half, panels_of_half>(cursor, args.V, stage, panels_of_half * 64);
        ptx::mbarrier_wait(shared.empty[stage][0], room);  // P was there
        copy<value_panels, 1>(cursor, args.K, stage, 0);
      }
      for (int step = 1; step <= mla_stages && n + step < count; ++step) cursor.next(args);
      if (n + mla_stages < count) look_up(cursor);
      if (half == 0) {
        ptx::copy_async_wait<0>();
        signal<0, panels_of_half>(stage, 0);
      } else {
        ptx::copy_async_wait<1>();
        signal<panels_of_half, panels_of_half>(stage, 1);
        ptx::copy_async_wait<0>();
        signal<value_panels, 1>(stage, 2);
      }
    }
  }
};

}  // namespace flash_attention::mla
