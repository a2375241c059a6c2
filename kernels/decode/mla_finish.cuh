#pragma once

#include "decode/mla_storage.cuh"

// The end of an item of decode/mla_sm90, or of a block's part of one. Each warpgroup holds half of the columns of all rows:
// a whole item goes from registers to O and lse, a part to the workspace, and the last block to arrive merges all parts
// (decode/merge.cuh).

namespace flash_attention::mla {

template <ForwardConfig config>
struct Finish {
  using Base = decode::MergeParts<config>;
  using Pair = ptx::Vector<float, 2>;
  using Values = float[mla_head_dim_v / 4];  // half of the columns of 64 rows, over a warpgroup

  const AttentionArgs& args;
  SharedStorage<config>& shared;
  int warpgroup;
  int first_row;  // of a thread; the other is 8 further
  int first_column;
  int thread = ptx::registers_fresh(static_cast<int>(threadIdx.x));  // not kept through the products
  Base base{args, shared.finish, shared.sequence, shared.cursor.item, thread, thread % 32, thread / 32};

  __device__ __forceinline__ Finish(const AttentionArgs& arguments, SharedStorage<config>& storage, int wg, int row,
                                    int column)
      : args(arguments), shared(storage), warpgroup(wg), first_row(row), first_column(column) {}

  __device__ __forceinline__ static void sync() { ptx::barrier_sync(barrier_attend, 2 * wg_threads); }

  __device__ __forceinline__ void operator()(const tile::RowState& rows, const Values& O, float scale_log2) const {
    const decode::Run<config>& run = shared.run;
    const int tile = shared.cursor.tile, count = shared.count();
    const decode::Parts<config> parts(args);
    const decode::Item<config>& item = shared.cursor.item;
    share_sums(rows);
    sync();  // the sums are ready, and Q is read no more
    const bool begins = tile == item.first_tile, ends = tile + count == item.end_tile;
    const int start = run.begin + shared.done - (tile - item.first_tile);
    const int block = ptx::registers_fresh(static_cast<int>(blockIdx.x));  // not kept through the products
    const int first = begins ? block : run.shares.block_of(start);
    if (begins && ends) {
      ptx::path<"decode/mla_sm90 whole item">();
      write_item(rows, O, scale_log2);
      sync();  // sums and marks have been read
      return;
    }
    ptx::path<"decode/mla_sm90 part of an item">();
    write_part(parts, parts.at(parts.slot_of(first, block - first)), rows, O, scale_log2);
    sync();  // everyone's writes come before the arrival
    const int blocks = run.shares.block_of(start + item.end_tile - item.first_tile - 1) - first + 1;
    if (threadIdx.x == 0) shared.finish.is_last = parts.arrive(first, blocks);
    sync();  // everyone knows, and sees what thread 0 has seen
    if (shared.finish.is_last) {
      ptx::path<"decode/mla_sm90 merged parts">();
      base.merge(parts, 0, blocks, [&](int x) { return parts.slot_of(first, x); });
    }
    sync();  // is_last and the factors have been read
  }

 private:
  __device__ __forceinline__ void share_sums(const tile::RowState& rows) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = tile::reduce_quad(rows.sum[half], [](float a, float b) { return a + b; });
      const int row = first_row + 8 * half;
      if (threadIdx.x % 4 == 0) shared.sum[warpgroup][row] = sum;
      if (Base::careful && threadIdx.x % 4 == 0 && warpgroup == 0) shared.not_finite[row] = 0;
    }
  }
  __device__ __forceinline__ static float max_log2(const tile::RowState& rows, int half, float scale_log2) {
    return rows.max[half] == -tile::infinity ? -tile::infinity : rows.max[half] * scale_log2;
  }
  __device__ __forceinline__ float sum_of(int row) const { return shared.sum[0][row] + shared.sum[1][row]; }

  __device__ __forceinline__ void write_part(const decode::Parts<config>& parts, float* part, const tile::RowState& rows,
                                             const Values& O, float scale_log2) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + 8 * half;
      if (row >= base.num_rows()) continue;
      float* to = part + decode::Parts<config>::value_offset(row) + first_column;
#pragma unroll
      for (int n = 0; n < mla_head_dim_v / 16; ++n) {
        ptx::store_global(reinterpret_cast<Pair*>(to + 8 * n), Pair{{O[4 * n + 2 * half], O[4 * n + 2 * half + 1]}});
      }
      if (warpgroup == 0 && threadIdx.x % 4 == 0) {
        ptx::store_global(reinterpret_cast<Pair*>(part + parts.statistics_offset(row)),
                          Pair{{max_log2(rows, half, scale_log2), sum_of(row)}});
      }
    }
  }

  __device__ __forceinline__ void write_item(const tile::RowState& rows, const Values& O, float scale_log2) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + 8 * half;
      if (row >= base.num_rows()) continue;
      const auto place = base.row_of(row);
      float lse;
      const float factor = base.finish_row(place, max_log2(rows, half, scale_log2), sum_of(row), lse);
      if (warpgroup == 0 && threadIdx.x % 4 == 0 && args.lse != nullptr) {
        constexpr Features features = config.features;
        args.lse[tile::statistics_offset<features>(args, shared.sequence, place.head_idx) + place.query] = lse;
      }
      if (Base::careful && warpgroup == 0 && threadIdx.x % 4 == 0) shared.lse[row] = lse;
      auto* to = base.output(place) + first_column;
      float check = 0;
#pragma unroll
      for (int n = 0; n < mla_head_dim_v / 16; ++n) {
        float value[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          value[e] = factor == 0 ? 0 : O[4 * n + 2 * half + e] * factor;
          check = ptx::fma(value[e], 0, check);
        }
        ptx::store_global(reinterpret_cast<unsigned*>(to + 8 * n), ptx::pack<config.features.dtype>(value[0], value[1]));
      }
      if (Base::careful && check != check) shared.not_finite[row] = 1;
    }
    if constexpr (Base::careful) repair();
  }

  /// Rows that 0 * NaN has reached, once more.
  __device__ __forceinline__ void repair() const {
    sync();  // the marks are ready, and what is replaced has been written
    for (int row = base.warp; row < base.num_rows(); row += Base::warps) {
      if (shared.not_finite[row] == 0) continue;
      const auto place = base.row_of(row);
      base.repair(place, shared.lse[row]);
    }
  }
};

}  // namespace flash_attention::mla
