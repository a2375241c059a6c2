#pragma once

#include "decode/mla_storage.cuh"
#include "ptx/async.cuh"

// The warpgroup of decode/mla_sm90 that loads: latent keys through the page table, by cp.async, 16 bytes a lane. A stage is
// filled in three parts, each with a barrier of its own, so that products begin before the whole of it is there, and a part
// is filled again as soon as the warpgroup that read it last is done. Keys that no row of the item sees become zero without
// being read.
//
// Copies are signalled two parts late, when they have landed; where the next part must wait for its room, all that is on
// its way is signalled first.

namespace flash_attention::mla {

template <ForwardConfig config>
struct Producer {
  static constexpr Features features = config.features;
  using Element = ptx::Element<features.dtype>;
  static constexpr int lag = 2;
  static constexpr int own_rows = mla_block_kv / 16;  // of a thread: thread / 8 + 16 i, of which it copies chunk thread % 8

  const AttentionArgs& args;
  SharedStorage<config>& shared;
  int thread;
  int issued = 0, signalled = 0;  // parts
  int page[own_rows] = {};        // of the next tile's rows
  int page_row[own_rows] = {};

  __device__ __forceinline__ int row_of(int i) const { return thread / 8 + 16 * i; }
  __device__ __forceinline__ static bool sees(const decode::Item<config>& item, int j) {
    return j >= item.seen.begin && j < item.seen.end;
  }

  __device__ __forceinline__ void look_up(const decode::Cursor<config>& next) {
    if constexpr (features.paged) {
#pragma unroll
      for (int i = 0; i < own_rows; ++i) {
        const int j = next.tile * mla_block_kv + row_of(i);
        if (!sees(next.item, j)) continue;
        const int entry = args.page_table[next.item.batch_idx * args.page_table_stride + j / args.page_size];
        page[i] = tile::max(0, tile::min(entry, args.num_pages - 1));  // as tile::PagedRows
        page_row[i] = j % args.page_size;
      }
    }
  }

  /// Parts before `until` have landed: whoever waits for them is told.
  __device__ __forceinline__ void signal(int until) {
    ptx::fence_async_shared();  // the products read them
    __syncwarp();               // every lane's copies have landed
    for (; signalled < until; ++signalled) {
      const int n = signalled / parts_of_stage;
      if (thread % 32 == 0) ptx::mbarrier_arrive(shared.full[n % mla_stages][signalled % parts_of_stage]);
    }
  }

  __device__ __forceinline__ void wait_for_room(ptx::Mbarrier& empty, int parity) {
    if (!ptx::any(!ptx::mbarrier_try_wait(empty, parity))) return;
    ptx::copy_async_wait<0>();
    signal(issued);
    ptx::mbarrier_wait(empty, parity);
  }

  /// Panels [first, first + panels) of the stage, from column 0 of a tensor's rows on.
  template <int first, int panels>
  __device__ __forceinline__ void copy(const decode::Cursor<config>& now, const TensorView& view, int stage,
                                       int first_column) {
    const int chunk = thread % 8;
    const auto* base =
        static_cast<const Element*>(view.data) + now.item.kv_head_idx * view.head_stride + first_column + chunk * 8;
    const unsigned to = ptx::shared_address(&shared.stage[stage]) + first * StageTile::panel_bytes;
#pragma unroll
    for (int i = 0; i < own_rows; ++i) {
      const int row = row_of(i), j = now.tile * mla_block_kv + row;
      const bool exists = sees(now.item, j);
      long long offset = 0;
      if constexpr (features.paged) {
        offset = page[i] * view.batch_stride + page_row[i] * view.seq_stride;
      } else {
        const long long start = features.packed ? args.cu_seqlens_kv[now.item.batch_idx] : 0;
        offset = now.item.batch_idx * view.batch_stride + (start + j) * view.seq_stride;
      }
      const Element* from = base + (exists ? offset : 0);
#pragma unroll
      for (int panel = 0; panel < panels; ++panel) {
        ptx::copy_async(to + StageTile::offset(row, chunk) + panel * StageTile::panel_bytes, from + panel * 64,
                        exists ? 16 : 0);
      }
    }
    ptx::copy_async_commit();
    if (++issued <= lag) return;
    ptx::copy_async_wait<lag>();
    signal(issued - lag);
  }

  __device__ __forceinline__ void run() {
    decode::Cursor<config> cursor = shared.run.start;
    look_up(cursor);
    tile::PipelineState<mla_stages> state(0);
#pragma unroll 1
    for (int left = shared.run.end - shared.run.begin; left > 0; --left) {
      wait_for_room(shared.empty[state.stage][0], state.phase ^ 1);
      copy<0, panels_of_half>(cursor, args.V, state.stage, 0);
      wait_for_room(shared.empty[state.stage][1], state.phase ^ 1);
      copy<panels_of_half, panels_of_half>(cursor, args.V, state.stage, panels_of_half * 64);
      copy<value_panels, 1>(cursor, args.K, state.stage, 0);
      state.advance();
      if (left > 1) {
        cursor.next(args);
        look_up(cursor);
      }
    }
    ptx::copy_async_wait<0>();
    signal(issued);
  }
};

}  // namespace flash_attention::mla
