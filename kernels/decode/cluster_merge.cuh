#pragma once

#include "decode/merge.cuh"
#include "ptx/cluster.cuh"

// The end of an item that the blocks of a cluster share (config.item_blocks): each leaves its part in its own shared
// memory, and the warps of all of them merge some columns of a row each, in the order of the keys, reading those of the
// others. Nothing goes through memory but the result. The sums are those of decode/merge.cuh, bit for bit.
//
//   each block:  part -> shared;  cluster barrier
//   each warp:   for its rows and columns: max, sum of all parts, a part per lane;  O = sum over parts;  O / sum -> global
//   cluster barrier: no block reads this one's shared memory any more, so it may end

namespace flash_attention::decode {

template <ForwardConfig config>
struct ClusterMerge : MergeParts<config> {
  using Base = MergeParts<config>;
  using Base::features, Base::warp, Base::lane, Base::warps, Base::repairs_rows;
  using Base::num_rows, Base::row_of, Base::finish_row, Base::write_lse, Base::output, Base::repair;
  using typename Base::Row;

  static constexpr bool in_cluster = decode_has_clusters(config);
  static constexpr int blocks = tile::max(1, config.item_blocks);
  static_assert(!in_cluster || blocks <= 32);  // a part per lane
  // Of a part, in floats: its rows, then their statistics.
  static constexpr int statistics_offset = config.block_q * config.head_dim_v;

  /// The barriers, for warps and blocks that have no part.
  __device__ __forceinline__ static void arrive_without_part() {
    if constexpr (in_cluster) {
      __syncwarp();
      ptx::cluster_arrive_relaxed();
      ptx::cluster_wait();
      ptx::cluster_arrive_relaxed();
    }
  }

  /// `part`: this block's, in shared memory; `parts`: how many there are, of the first blocks of the cluster.
  __device__ __forceinline__ void merge_in_cluster(const float* part, int parts) const {
    ptx::path<"decode/sm90 merged in a cluster">();
    ptx::cluster_arrive();
    ptx::cluster_wait();  // all parts are written
    constexpr int chunks = tile::ceil_div(config.head_dim_v, 32);
    constexpr int row_units = repairs_rows ? 1 : chunks;  // a row that may have to be repaired belongs to one warp
    const int rank = static_cast<int>(blockIdx.x) % blocks;
    const auto address = [&](int x, int offset) { return ptx::cluster_address(part + offset, static_cast<unsigned>(x)); };
#pragma unroll 1
    for (int unit = rank + parts * warp; unit < num_rows() * row_units; unit += parts * warps) {
      const int row = unit / row_units;
      float max = -tile::infinity, sum = 0;  // of this lane's part, then of all
      if (lane < parts) {
        const unsigned from = address(lane, statistics_offset + 2 * row);
        max = ptx::cluster_load(from), sum = ptx::cluster_load(from + 4);
      }
      float values[blocks];
      const auto load = [&](int column) {
#pragma unroll
        for (int x = 0; x < blocks; ++x) {
          const bool exists = x < parts && column < config.head_dim_v;
          values[x] = exists ? ptx::cluster_load(address(x, row * config.head_dim_v + column)) : 0;
        }
      };
      int column = unit % row_units * 32 + lane;
      load(column);  // under the statistics
      const float own_max = max;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) max = ptx::max(max, ptx::shuffle_xor(max, step));
      const float own_factor = ptx::exp2(own_max - (max == -tile::infinity ? 0 : max));
      sum *= own_factor;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) sum += ptx::shuffle_xor(sum, step);
      float lse, check = 0;
      const Row place = row_of(row);
      const float factor = finish_row(place, max, sum, lse);
      if (column == 0) write_lse(place, lse);
#pragma unroll 1
      for (int chunk = unit % row_units; chunk < chunks; chunk += row_units, column += 32 * row_units) {
        if (chunk >= row_units) load(column);
        float total = 0;
#pragma unroll
        for (int x = 0; x < blocks; ++x) {
          const float part_factor = ptx::shuffle(own_factor, x);
          if (x < parts) total = ptx::fma(part_factor, values[x], total);
        }
        const float value = factor == 0 ? 0 : total * factor, next = ptx::shuffle_xor(value, 1);
        check = ptx::fma(value, 0, check);
        if (column < config.head_dim_v && lane % 2 == 0)
          ptx::store_global(reinterpret_cast<unsigned*>(output(place) + column), ptx::pack<features.dtype>(value, next));
      }
      if constexpr (repairs_rows) {
        if (ptx::any(check != check)) repair(place, lse);
      }
    }
    ptx::cluster_arrive_relaxed();  // what was read has gone into what was written
    ptx::cluster_wait();
  }
};

}  // namespace flash_attention::decode
