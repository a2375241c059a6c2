#pragma once

#include "decode/mla_sm90/storage.cuh"
#include "ptx/matrix_store.cuh"

// The end of an item of decode/mla_sm90, or of a block's part of an item. Each warpgroup holds half of the columns of all
// rows. A whole item is written from registers to O and lse, a part to the workspace; the last block to arrive merges all
// parts (decode/merge.cuh).

namespace flash_attention::mla {

template <ForwardConfig config>
struct Finish {
  using Rows = decode::FinishRows<config>;
  using Pair = ptx::Vector<float, 2>;
  using Values = float[mla_head_dim_v / 4];  // half of the columns of 64 rows, over a warpgroup
  using Scales = float[2];                   // factors from scores to exponents of two, for a thread's rows

  const AttentionArgs& args;
  SharedStorage<config>& shared;
  int warpgroup;
  int first_row;  // of a thread; its other row is 8 further
  int first_column;
  int thread = ptx::hide_from_compiler(static_cast<int>(threadIdx.x));  // not kept through the products
  Rows rows_of_item{args, shared.finish, shared.sequence, shared.cursor.item, thread, thread % 32, thread / 32};

  __device__ __forceinline__ Finish(const AttentionArgs& arguments, SharedStorage<config>& storage, int wg, int row,
                                    int column)
      : args(arguments), shared(storage), warpgroup(wg), first_row(row), first_column(column) {}

  __device__ __forceinline__ static void sync() { ptx::barrier_sync(barrier_attend, 2 * wg_threads); }

  __device__ __forceinline__ void operator()(const tile::RowState& rows, const Values& O, const Scales& scales) const {
    const decode::Run<config>& run = shared.run;
    const int tile = shared.cursor.tile, count = shared.count();
    const decode::Parts<config> parts(args);
    const decode::Item<config>& item = shared.cursor.item;
    share_sums(rows);
    sync();  // the sums are written, and no product reads Q any more
    const bool begins = tile == item.first_tile, ends = tile + count == item.end_tile;
    const int start = run.begin + shared.done - (tile - item.first_tile);
    const int block = ptx::hide_from_compiler(static_cast<int>(blockIdx.x));  // not kept through the products
    const int first = begins ? block : run.shares.block_of(start);
    if (begins && ends) {
      ptx::path<"decode/mla_sm90 whole item">();
      write_item(rows, O, scales);
      sync();  // all have read sums and marks
      return;
    }
    ptx::path<"decode/mla_sm90 part of an item">();
    write_part(parts, parts.at(parts.slot_of(first, block - first)), rows, O, scales);
    sync();  // all writes of the block come before the arrival
    const int blocks = run.shares.block_of(start + item.end_tile - item.first_tile - 1) - first + 1;
    // Many parts are first merged in groups, because one block would take long for all of them.
    int group = 1;
    if (blocks >= 6) {
      while (2 * group * group < blocks) group *= 2;
      const int begin = (block - first) / group * group, end = tile::min(begin + group, blocks);
      if (end - begin > 1) {
        // A group counts in the word of a block that is neither the first nor the last of the item, so no other item uses
        // it.
        if (!arrive(parts, begin == 0 ? first + 1 : first + begin, end - begin)) return;
        ptx::path<"decode/mla_sm90 merged group">();
        decode::merge_parts<true>(rows_of_item, parts, begin, end, [&](int x) { return parts.slot_of(first, x); });
        sync();  // all writes of the block come before the arrival
      }
    }
    const int groups = tile::ceil_div(blocks, group);
    if (!arrive(parts, first, groups)) return;
    ptx::path<"decode/mla_sm90 merged parts">();
    decode::merge_parts(rows_of_item, parts, 0, groups, [&](int x) { return parts.slot_of(first, x * group); });
    sync();  // is_last and the factors have been read
  }

  /// Counts an arrival at a word. Returns whether this block is the last of `count`.
  __device__ __forceinline__ bool arrive(const decode::Parts<config>& parts, int word, int count) const {
    if (threadIdx.x == 0) {
      parts.prepare(word);
      shared.finish.is_last = parts.arrive(word, count);
    }
    sync();  // everyone knows, and sees what thread 0 has seen
    const bool is_last = shared.finish.is_last;
    sync();  // is_last has been read
    return is_last;
  }

 private:
  __device__ __forceinline__ void share_sums(const tile::RowState& rows) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = tile::reduce_quad(rows.sum[half], [](float a, float b) { return a + b; });
      const int row = first_row + 8 * half;
      if (threadIdx.x % 4 == 0) shared.sum[warpgroup][row] = sum;
      if (Rows::repairs_rows && threadIdx.x % 4 == 0 && warpgroup == 0) shared.not_finite[row] = 0;
    }
  }
  __device__ __forceinline__ static float max_log2(const tile::RowState& rows, int half, const Scales& scales) {
    return rows.max[half] == -tile::infinity ? -tile::infinity : rows.max[half] * scales[half] - log2_P_scale<config>;
  }
  __device__ __forceinline__ float sum_of(int row) const { return shared.sum[0][row] + shared.sum[1][row]; }

  __device__ __forceinline__ void write_part(const decode::Parts<config>& parts, float* part, const tile::RowState& rows,
                                             const Values& O, const Scales& scales) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + 8 * half;
      if (row >= rows_of_item.num_rows()) continue;
      float* to = part + decode::Parts<config>::value_offset(row) + first_column;
#pragma unroll
      for (int n = 0; n < mla_head_dim_v / 16; ++n) {
        ptx::store_global(reinterpret_cast<Pair*>(to + 8 * n), Pair{{O[4 * n + 2 * half], O[4 * n + 2 * half + 1]}});
      }
      if (warpgroup == 0 && threadIdx.x % 4 == 0) {
        ptx::store_global(reinterpret_cast<Pair*>(part + parts.statistics_offset(row)),
                          Pair{{max_log2(rows, half, scales), sum_of(row)}});
      }
    }
  }

  __device__ __forceinline__ void write_item(const tile::RowState& rows, const Values& O, const Scales& scales) const {
    float factors[2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + 8 * half;
      if (row >= rows_of_item.num_rows()) continue;
      const auto place = rows_of_item.row_of(row);
      float lse;
      const float factor = rows_of_item.finish_row(place, max_log2(rows, half, scales), sum_of(row), lse);
      if (warpgroup == 0 && threadIdx.x % 4 == 0 && args.lse != nullptr) {
        constexpr Features features = config.features;
        args.lse[tile::statistics_offset<features>(args, shared.sequence, place.head_idx) + place.query] = lse;
      }
      if (warpgroup == 0 && threadIdx.x % 4 == 0) rows_of_item.write_row_max(place, max_log2(rows, half, scales));
      if (Rows::repairs_rows && warpgroup == 0 && threadIdx.x % 4 == 0) shared.lse[row] = lse;
      factors[half] = factor;
    }
    stage_output(O, factors);
    __syncwarp();  // a warp writes its own rows of its warpgroup's columns
    copy_output();
    if constexpr (Rows::repairs_rows) repair();
  }

  /// Writes O of this warpgroup in 16 bits to shared memory, over Q and in the layout of its panels.
  __device__ __forceinline__ void stage_output(const Values& O, const float (&factors)[2]) const {
    const int lane = thread % 32, tile = lane / 8, row = thread / 32 % 4 * 16 + tile % 2 * 8 + lane % 8;
    unsigned char* to = shared.Q.bytes + warpgroup * panels_of_half * StageTile::panel_bytes;
#pragma unroll
    for (int n = 0; n < mla_head_dim_v / 16; n += 2) {
      unsigned packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float *pair = O + 4 * (n + i / 2) + 2 * (i % 2), factor = factors[i % 2];
        packed[i] =
            ptx::pack<config.features.dtype>(factor == 0 ? 0 : pair[0] * factor, factor == 0 ? 0 : pair[1] * factor);
      }
      ptx::stmatrix_x4(to + StageTile::offset(row, n + tile / 2), packed[0], packed[1], packed[2], packed[3]);
    }
  }

  /// Copies a warp's rows of O to global memory, one row at a time, and marks rows that are not finite.
  __device__ __forceinline__ void copy_output() const {
    using Chunk = ptx::Vector<unsigned, 4>;
    const int lane = thread % 32, begin = thread / 32 % 4 * 16;
    const unsigned from = ptx::shared_address(&shared.Q) + warpgroup * panels_of_half * StageTile::panel_bytes;
#pragma unroll 2
    for (int row = begin; row < begin + 16; ++row) {
      if (row >= rows_of_item.num_rows()) continue;
      const auto values = ptx::load_shared<Chunk>(from + StageTile::offset(row, lane));
      auto* to = rows_of_item.output(rows_of_item.row_of(row)) + warpgroup * (mla_head_dim_v / 2) + 8 * lane;
      ptx::store_global(reinterpret_cast<Chunk*>(to), values);
      if constexpr (Rows::repairs_rows) {
        constexpr unsigned exponent = config.features.dtype == Type::float16 ? 0x7c00u : 0x7f80u;
        bool finite = true;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          finite = finite && (values[i] & exponent) != exponent && (values[i] >> 16 & exponent) != exponent;
        }
        if (!finite) shared.not_finite[row] = 1;
      }
    }
  }

  /// Computes rows that 0 * NaN has reached again.
  __device__ __forceinline__ void repair() const {
    sync();  // all marks and outputs are written
    for (int row = rows_of_item.warp; row < rows_of_item.num_rows(); row += Rows::warps) {
      if (shared.not_finite[row] == 0) continue;
      const auto place = rows_of_item.row_of(row);
      rows_of_item.repair(place, shared.lse[row]);
    }
  }
};

}  // namespace flash_attention::mla
