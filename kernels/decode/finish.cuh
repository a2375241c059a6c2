#pragma once

#include "decode/cluster_merge.cuh"

// The epilogue of an item, or of a block's part of an item: combines the results of the warps that shared its keys.
//
//   each warp: max and sum -> shared memory
//   for each group of columns (as many as fit in shared memory):
//     O of each warp -> shared memory;  barrier
//     for each row, one warp a row: sum over the warps -> O and lse if the item is whole, else a part in the workspace
//   if parts were left, the last block to arrive merges all of them, in their order      decode/merge.cuh
//   or, in a cluster, each block merges some of the columns                              decode/cluster_merge.cuh

namespace flash_attention::decode {

template <ForwardConfig config>
struct Finish {
  using Rows = FinishRows<config>;
  using Cluster = ClusterMerge<config>;
  using Row = typename Rows::Row;
  using Four = typename Rows::Four;
  using Pair = typename Rows::Pair;
  static constexpr Features features = config.features;
  static constexpr DecodeLayout layout{config};
  static constexpr int warps = Rows::warps, columns = Rows::columns, dim_v = Rows::dim_v;
  static constexpr bool narrow = Rows::narrow, grouped = Rows::grouped, repairs_rows = Rows::repairs_rows;

  const Rows out;  // where the rows go

  /// Maximum and sum of a row over the warps that share its keys, and the factor of each warp's sums.
  struct Total {
    float max = -tile::infinity;
    float sum = 0;
    float factor[layout.key_warps];
  };
  __device__ __forceinline__ Total total_of(int row) const {
    Total total;
    const unsigned from = ptx::shared_address(&out.storage.statistics[row]);
#pragma unroll
    for (int k = 0; k < layout.key_warps; ++k) total.max = ptx::max(total.max, ptx::load_shared<float>(from + 8 * k));
    const float reference = total.max == -tile::infinity ? 0 : total.max;
#pragma unroll
    for (int k = 0; k < layout.key_warps; ++k) {
      const auto statistics = ptx::load_shared<Pair>(from + 8 * k);
      total.factor[k] = ptx::exp2(statistics[0] - reference);
      total.sum = ptx::fma(total.factor[k], statistics[1], total.sum);
    }
    return total;
  }

  /// Writes maximum and sum of the warp's rows to shared memory, for total_of().
  __device__ __forceinline__ void share_statistics(const typename Rows::State& rows, float scale_log2) const {
    // the warp with the first columns has the same statistics
    if (layout.column_warps > 1 && column_warp() > 0) return;
    const auto share = [&](int row, float max, float sum) {
      const float scaled_max = max == -tile::infinity ? -tile::infinity : max * scale_log2;
      out.storage.statistics[row][out.warp / layout.row_warps] = Pair{{scaled_max, sum}};
    };
    if constexpr (grouped) {
      rows.for_each_row(out.lane, share);
    } else {
      const int first = out.warp % layout.row_warps * 16 + out.lane / 4;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float sum = tile::reduce_quad(rows.sum[half], [](float a, float b) { return a + b; });
        if (out.lane % 4 == 0) share(first + 8 * half, rows.max[half], sum);
      }
    }
  }

  /// The layout in which the warps exchange O: the rows of each warp, some columns at a time. Rows are padded so that
  /// neighbouring rows begin in different banks.
  template <int rows_of_warp, int columns_at_once>
  struct Exchange {
    static constexpr int rows = rows_of_warp, columns = columns_at_once;
    // If a row takes 16 lanes, a warp processes two rows at a time. With options there are not enough registers for that.
    static constexpr int lanes_of_row = tile::Score<features>::linear ? columns / 4 : 32, rows_at_once = 32 / lanes_of_row;
    static_assert(warps / layout.column_warps * rows * (columns + 4) * 4 <= layout.merge_bytes);
    static_assert(layout.column_warps == 1 || dim_v % columns == 0);

    __device__ __forceinline__ static int offset(int warp, int row, int column) {
      return (warp * rows + row) * (columns + 4) + column;
    }
  };

  /// Which columns of O the warp has, and its number among the warps that have the same columns.
  __device__ __forceinline__ int column_warp() const { return out.warp / (layout.row_warps * layout.key_warps); }
  __device__ __forceinline__ int exchange_warp() const {
    return layout.column_warps == 1 ? out.warp : out.warp % (layout.row_warps * layout.key_warps);
  }

  /// Writes columns [begin, begin + columns) of the warp's rows to shared memory.
  template <typename E, int begin_of_all>
  __device__ __forceinline__ void share_columns(const typename Rows::Sums& O) const {
    const tile::LanePlace place(out.lane);
    constexpr int begin = begin_of_all % dim_v;  // of the warp's
    if (layout.column_warps > 1 && column_warp() != begin_of_all / dim_v) return;
    if constexpr (grouped) return share_turned<E, begin>(O);
    if (E::rows < 8 && place.row >= E::rows) return;
    constexpr int halves = E::rows > 8 ? 2 : 1;
    if constexpr (narrow) {  // blocks 2c and 2c + 1 hold the even and the odd columns of 16c to 16c + 15
      const unsigned to = ptx::shared_address(&out.storage.O[E::offset(exchange_warp(), place.row, 2 * place.column)]);
#pragma unroll
      for (int n = begin / 8; n < tile::min(dim_v, begin + E::columns) / 8; n += 2) {
#pragma unroll
        for (int half = 0; half < halves; ++half) {
          const float(&even)[4] = O[0][n], (&odd)[4] = O[0][n + 1];
          ptx::store_shared(to + 4 * E::offset(0, 8 * half, 8 * n - begin),
                            Four{{even[2 * half], odd[2 * half], even[2 * half + 1], odd[2 * half + 1]}});
        }
      }
      return;
    }
    const unsigned to = ptx::shared_address(&out.storage.O[E::offset(exchange_warp(), place.row, place.column)]);
#pragma unroll
    for (int n = begin / 8; n < tile::min(dim_v, begin + E::columns) / 8; ++n) {
#pragma unroll
      for (int half = 0; half < halves; ++half)
        ptx::store_shared(to + 4 * E::offset(0, 8 * half, 8 * n - begin), Pair{{O[0][n][2 * half], O[0][n][2 * half + 1]}});
    }
  }

  /// The same of turned products: blocks 2c and 2c + 1 of 8 rows hold columns 4g to 4g + 3 of 32c to 32c + 31, in pairs.
  template <typename E, int begin>
  __device__ __forceinline__ void share_turned(const typename Rows::Sums& O) const {
    const int first = out.lane % 4 * 2;
#pragma unroll
    for (int r = 0; r < Turned<config>::row_tiles; ++r) {
      const unsigned to = ptx::shared_address(&out.storage.O[E::offset(out.warp, 8 * r + first, out.lane / 4 * 4)]);
#pragma unroll
      for (int column = begin; column < tile::min(dim_v, begin + E::columns); column += 32) {
        const float(&even)[4] = O[0][r * (dim_v / 16) + column / 16], (&odd)[4] = O[0][r * (dim_v / 16) + column / 16 + 1];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (8 * r + first + e < E::rows)
            ptx::store_shared(to + 4 * E::offset(0, e, column - begin), Four{{even[e], even[2 + e], odd[e], odd[2 + e]}});
        }
      }
    }
  }

  template <typename E>
  __device__ __forceinline__ Four add_up(const Total& total, int row, int column) const {
    Four sum{};
    const unsigned from = ptx::shared_address(&out.storage.O[E::offset(row / 16, row % 16, column)]);
#pragma unroll
    for (int k = 0; k < layout.key_warps; ++k) {
      const auto four = ptx::load_shared<Four>(from + 4 * E::offset(k * layout.row_warps, 0, 0));
#pragma unroll
      for (int c = 0; c < 4; ++c) sum[c] = ptx::fma(total.factor[k], four[c], sum[c]);
    }
    return sum;
  }

  /// Combines the block's warps, for the columns from `begin` on. part: the destination if the item is not whole.
  template <typename E, int begin = 0>
  __device__ __forceinline__ void collect(const typename Rows::Sums& O, const Parts<config>& parts, float* part) const {
    if constexpr (begin < config.head_dim_v) {
      if (begin != 0) ptx::path<"decode/sm80 more columns">();
      share_columns<E, begin>(O);
      sync_consumers<config>();  // the columns are written, and the first time the statistics, too
      if constexpr (Cluster::in_cluster && begin == 0) Cluster::announce(out);
      const int rows = out.num_rows(), column = begin + out.lane % E::lanes_of_row * 4;
      for (int first = out.warp * E::rows_at_once; first < rows; first += warps * E::rows_at_once) {
        const int row = first + out.lane / E::lanes_of_row;
        const bool leads = begin == 0 && column == 0 && row < rows;
        const bool has_column = row < rows && column < tile::min(begin + E::columns, config.head_dim_v);
        const Total total = total_of(row);
        const Four sum = has_column ? add_up<E>(total, row, column - begin) : Four{};
        if constexpr (Cluster::in_cluster) {  // pieces are complete: columns that do not exist are sent as zero
          if (row < rows && column < tile::min(begin + E::columns, tile::round_up(config.head_dim_v, 32)))
            Cluster::send(out, part, row, column, sum, Pair{{total.max, total.sum}});
          continue;
        }
        if (part != nullptr) {
          if (has_column) ptx::store_global(reinterpret_cast<Four*>(part + Parts<config>::value_offset(row) + column), sum);
          if (leads)
            ptx::store_global(reinterpret_cast<Pair*>(part + parts.statistics_offset(row)), Pair{{total.max, total.sum}});
          continue;
        }
        float lse;
        const Row place = out.row_of(tile::min(row, rows - 1));
        const float factor = out.finish_row(place, total.max, total.sum, lse);
        if (leads) out.write_lse(place, lse), out.write_row_max(place, total.max);
        const bool finite = !has_column || out.write_four(place, column, sum, factor);
        if constexpr (repairs_rows) {
#pragma unroll 1
          for (int u = 0; u < E::rows_at_once; ++u) {
            if (ptx::any(!finite && out.lane / E::lanes_of_row == u))
              out.repair(out.row_of(first + u), ptx::shuffle(lse, u * E::lanes_of_row));
          }
        }
      }
      sync_consumers<config>();  // all warps have read the columns
      collect<E, begin + E::columns>(O, parts, part);
    }
  }

  /// In the fixed order each warp has the complete sums of its columns, and the first warp the row sums. They are
  /// exchanged only so that they can be written row by row.
  template <int blocks>
  __device__ __forceinline__ void collect_in_order(const typename Rows::State& rows, const float (&O)[1][blocks][4],
                                                   const Parts<config>& parts, float* part, float scale_log2) const {
    constexpr int own_columns = 8 * blocks, stride = DecodeLayout::columns_in_order(config) + 4;
    const tile::LanePlace place(out.lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = tile::reduce_quad(rows.sum[half], [](float a, float b) { return a + b; });
      if (out.warp == 0 && out.lane % 4 == 0) out.storage.statistics[place.row + 8 * half][0] = Pair{{rows.max[half], sum}};
    }
    const int first_column = out.warp * own_columns;
#pragma unroll
    for (int n = 0; n < blocks; ++n) {
      if (narrow && n % 2 != 0) continue;  // blocks 2c and 2c + 1 hold the even and the odd columns of 16c to 16c + 15
      if (first_column + 8 * n >= dim_v) break;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = (place.row + 8 * half) * stride + first_column + 8 * n;
        if constexpr (narrow) {
          const float(&even)[4] = O[0][n], (&odd)[4] = O[0][n + 1];
          ptx::store_shared(ptx::shared_address(&out.storage.O[row + 2 * place.column]),
                            Four{{even[2 * half], odd[2 * half], even[2 * half + 1], odd[2 * half + 1]}});
        } else {
          ptx::store_shared(ptx::shared_address(&out.storage.O[row + place.column]),
                            Pair{{O[0][n][2 * half], O[0][n][2 * half + 1]}});
        }
      }
    }
    sync_consumers<config>();  // columns and statistics are written
    for (int row = out.warp; row < out.num_rows(); row += warps) {
      const auto statistics = ptx::load_shared<Pair>(ptx::shared_address(&out.storage.statistics[row][0]));
      const Row of = out.row_of(row);
      float lse = 0, factor = 1;
      if (part == nullptr) {
        factor = out.finish_row(of, statistics[0], statistics[1], scale_log2, lse);
        if (out.lane == 0) out.write_lse(of, lse);
      } else if (out.lane == 0) {
        ptx::store_global(reinterpret_cast<Pair*>(part + parts.statistics_offset(row)), statistics);
      }
      bool finite = true;
      for (int column = 4 * out.lane; column < config.head_dim_v; column += 128) {
        const auto sum = ptx::load_shared<Four>(ptx::shared_address(&out.storage.O[row * stride + column]));
        if (part != nullptr) {
          ptx::store_global(reinterpret_cast<Four*>(part + Parts<config>::value_offset(row) + column), sum);
        } else {
          finite = out.write_four(of, column, sum, factor) && finite;
        }
      }
      if constexpr (repairs_rows) {
        if (ptx::any(!finite)) out.repair(of, lse);
      }
    }
    sync_consumers<config>();  // all warps have read the columns
  }

  /// If at most half of a tile's rows exist, twice as many columns fit at a time: one exchange instead of two.
  __device__ __forceinline__ void collect_all(const typename Rows::Sums& O, const Parts<config>& parts, float* part) const {
    constexpr int few = layout.warp_rows / 2;
    constexpr bool worth_it = config.producer_warp && tile::Score<features>::linear && config.group <= few;
    if constexpr (worth_it && columns == 64 && config.head_dim_v > 64 && layout.column_warps == 1) {
      if (out.num_rows() <= few) {
        ptx::path<"decode/sm90 few rows">();
        return collect<Exchange<few, 128>>(O, parts, part);
      }
    }
    collect<Exchange<layout.warp_rows, columns>>(O, parts, part);
  }

  /// Finishes `count` tiles of the item, beginning with `tile`, which is tile `position` of all tiles. `received`: memory
  /// for the parts that the other blocks of a cluster send; no tile is loaded there any more.
  template <int blocks>
  __device__ __forceinline__ void operator()(const Run<config>& run, const Parts<config>& parts, int tile, int count,
                                             int position, const typename Rows::State& rows, const float (&O)[1][blocks][4],
                                             float scale_log2, float* received) const {
    if constexpr (has_fixed_order(config)) {
      const int start = position - (tile - out.item.first_tile);
      end_segment(run.shares, parts, start, tile, rows, O, scale_log2);
    } else {
      combine(run, parts, tile, count, position, rows, O, scale_log2, received);
    }
  }

 private:
  __device__ __forceinline__ void combine(const Run<config>& run, const Parts<config>& parts, int tile, int count,
                                          int position, const typename Rows::State& rows, const typename Rows::Sums& O,
                                          float scale_log2, float* received) const {
    share_statistics(rows, scale_log2);
    if constexpr (Cluster::in_cluster) {
      collect_all(O, parts, received);
      return Cluster::merge_received(out, received);
    }
    if constexpr (!Rows::shares_items) return collect_all(O, parts, nullptr);
    const int start = position - (tile - out.item.first_tile);
    const bool begins = tile == out.item.first_tile, ends = tile + count == out.item.end_tile;
    const int first = begins ? static_cast<int>(blockIdx.x) : run.first_block_of(start);
    const int own = static_cast<int>(blockIdx.x) - first;
    const bool whole = begins && ends;
    collect_all(O, parts, whole ? nullptr : parts.at(parts.slot_of(first, own)));
    if (whole) {
      ptx::path<"decode/sm80 whole item">();
      return;
    }
    ptx::path<"decode/sm80 part of an item">();
    // The barrier at the end of collect() orders all threads' writes before the arrival.
    const int blocks = run.blocks_of(out.item, first, start);
    if (out.thread == 0) out.storage.is_last = parts.arrive(first, blocks);
    sync_consumers<config>();  // everyone knows, and sees what thread 0 has seen
    if (out.storage.is_last) {
      ptx::path<"decode/sm80 merged parts">();
      merge_parts(out, parts, 0, blocks, [&](int x) { return parts.slot_of(first, x); });
    }
    sync_consumers<config>();  // is_last and the factors have been read
  }

  /// Finishes the segment that `tile` begins, of an item whose first tile is tile `start` of all.
  template <int blocks>
  __device__ __forceinline__ void end_segment(const Shares& shares, const Parts<config>& parts, int start, int tile,
                                              const typename Rows::State& rows, const float (&O)[1][blocks][4],
                                              float scale_log2) const {
    if constexpr (!Rows::shares_items) return collect_in_order(rows, O, parts, nullptr, scale_log2);
    const int first = out.item.split_of(out.item.first_tile), last = out.item.split_of(out.item.end_tile - 1),
              own = out.item.split_of(tile);
    float* const part = first == last ? nullptr : parts.at(parts.slot_of_split(shares, out.item, start, own));
    collect_in_order(rows, O, parts, part, scale_log2);
    if (first == last) return;
    // A block's segments of an item arrive together, when the last of them is finished.
    const int block = static_cast<int>(blockIdx.x), origin = start - out.item.first_tile;  // of tile 0 of the keys
    if (own != last && shares.block_of(origin + (own + 1) * config.split_tiles) == block) return;
    // The barrier at the end of collect() orders everyone's writes before the arrival.
    const int first_block = shares.block_of(start), last_block = shares.block_of(origin + last * config.split_tiles);
    if (out.thread == 0) {
      const int own_first =
          block == first_block ? first : tile::ceil_div(shares.begin_of(block) - origin, config.split_tiles);
      out.storage.is_last = first_block == last_block || parts.arrive(first_block, last - first + 1, own - own_first + 1);
    }
    sync_consumers<config>();  // everyone knows, and sees what thread 0 has seen
    if (out.storage.is_last)
      merge_in_order(out, parts, first, last + 1, scale_log2,
                     [&](int split) { return parts.slot_of_split(shares, out.item, start, split); });
    sync_consumers<config>();  // is_last has been read
  }
};

}  // namespace flash_attention::decode
