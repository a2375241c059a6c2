#pragma once

#include "decode/merge.cuh"

// The epilogue of an item, or of a block's part of one: the warps that shared its keys add up what they have.
//
//   each warp: max, sum -> shared
//   for each group of columns:
//     O of each warp -> shared
//     for each row, a warp per row: sum over warps -> O and lse of a whole item, or a part in the workspace
//   the last block to leave a part of an item: merge all parts, in their order    (decode/merge.cuh)

namespace flash_attention::decode {

template <ForwardConfig config>
struct Finish : MergeParts<config> {
  using Base = MergeParts<config>;
  using Base::features, Base::layout, Base::warps, Base::columns, Base::dim_v, Base::narrow, Base::careful;
  using Base::num_rows, Base::row_of, Base::finish_row, Base::write_lse, Base::write_four, Base::repair, Base::merge;
  using Base::storage, Base::item, Base::thread, Base::lane, Base::warp;
  using typename Base::Four, typename Base::Pair, typename Base::Row;

  /// Maximum and sum of a row over the warps that share its keys, and each warp's factor.
  struct Total {
    float max = -tile::infinity;
    float sum = 0;
    float factor[layout.key_warps];
  };
  __device__ __forceinline__ Total total_of(int row) const {
    Total total;
#pragma unroll
    for (int k = 0; k < layout.key_warps; ++k)
      total.max = ptx::max(total.max, storage.max[k * layout.row_warps + row / 16][row % 16]);
    const float reference = total.max == -tile::infinity ? 0 : total.max;
#pragma unroll
    for (int k = 0; k < layout.key_warps; ++k) {
      const int from = k * layout.row_warps + row / 16;
      total.factor[k] = ptx::exp2(storage.max[from][row % 16] - reference);
      total.sum = ptx::fma(total.factor[k], storage.sum[from][row % 16], total.sum);
    }
    return total;
  }

  /// Maximum and sum of the warp's rows, for total_of().
  __device__ __forceinline__ void share_statistics(const tile::RowState& rows, float scale_log2) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = tile::reduce_quad(rows.sum[half], [](float a, float b) { return a + b; });
      if (lane % 4 != 0) continue;
      storage.max[warp][lane / 4 + 8 * half] =
          rows.max[half] == -tile::infinity ? -tile::infinity : rows.max[half] * scale_log2;
      storage.sum[warp][lane / 4 + 8 * half] = sum;
    }
  }

  /// Columns [begin, begin + columns) of the warp's rows.
  template <int begin>
  __device__ __forceinline__ void share_columns(const float (&O)[1][dim_v / 8][4]) const {
    const tile::LanePlace place(lane);
    if constexpr (narrow) {  // blocks 2c and 2c + 1 are the even and the odd ones of columns 16c to 16c + 15
#pragma unroll
      for (int n = begin / 8; n < tile::min(dim_v, begin + columns) / 8; n += 2) {
#pragma unroll
        for (int half = 0; half < layout.warp_rows / 8; ++half) {
          const float(&even)[4] = O[0][n], (&odd)[4] = O[0][n + 1];
          const unsigned to = ptx::shared_address(&storage.O[warp][place.row + 8 * half][8 * n - begin + 2 * place.column]);
          ptx::store_shared(to, Four{{even[2 * half], odd[2 * half], even[2 * half + 1], odd[2 * half + 1]}});
        }
      }
      return;
    }
#pragma unroll
    for (int n = begin / 8; n < tile::min(dim_v, begin + columns) / 8; ++n) {
#pragma unroll
      for (int half = 0; half < layout.warp_rows / 8; ++half) {
        const unsigned to = ptx::shared_address(&storage.O[warp][place.row + 8 * half][8 * n - begin + place.column]);
        ptx::store_shared(to, Pair{{O[0][n][2 * half], O[0][n][2 * half + 1]}});
      }
    }
  }

  __device__ __forceinline__ Four add_up(const Total& total, int row, int column) const {
    Four sum{};
#pragma unroll
    for (int k = 0; k < layout.key_warps; ++k) {
      const int from = k * layout.row_warps + row / 16;
      const auto four = ptx::load_shared<Four>(ptx::shared_address(&storage.O[from][row % 16][column]));
#pragma unroll
      for (int c = 0; c < 4; ++c) sum[c] = ptx::fma(total.factor[k], four[c], sum[c]);
    }
    return sum;
  }

  /// The block's warps put together, columns from `begin` on; part: where the result goes if it is not the whole item's.
  template <int begin>
  __device__ __forceinline__ void collect(const float (&O)[1][dim_v / 8][4], const Parts<config>& parts,
                                          float* part) const {
    if constexpr (begin < config.head_dim_v) {
      if (begin != 0) ptx::path<"decode/sm80 more columns">();
      share_columns<begin>(O);
      sync_consumers<config>();  // the columns, and at first the statistics, are ready
      for (int row = warp; row < num_rows(); row += warps) {
        const Total total = total_of(row);
        const int column = 4 * lane;
        const bool has_column = column < columns && begin + column < config.head_dim_v;
        const Four sum = has_column ? add_up(total, row, column) : Four{};
        if (part != nullptr) {
          if (has_column)
            ptx::store_global(reinterpret_cast<Four*>(part + Parts<config>::value_offset(row) + begin + column), sum);
          if (begin == 0 && lane == 0)
            ptx::store_global(reinterpret_cast<Pair*>(part + parts.statistics_offset(row)), Pair{{total.max, total.sum}});
          continue;
        }
        float lse;
        const Row place = row_of(row);
        const float factor = finish_row(place, total.max, total.sum, lse);
        if (begin == 0) write_lse(place, lse);
        const bool finite = !has_column || write_four(place, begin + column, sum, factor);
        if constexpr (careful) {
          if (ptx::any(!finite)) repair(place, lse);
        }
      }
      sync_consumers<config>();  // everyone has read the columns
      collect<begin + columns>(O, parts, part);
    }
  }

  /// O of the tiles from `tile` on, `count` of them, of which the first is tile `position` of the run of all blocks.
  __device__ __forceinline__ void operator()(const Run<config>& run, const Parts<config>& parts, int tile, int count,
                                             int position, const tile::RowState& rows, const float (&O)[1][dim_v / 8][4],
                                             float scale_log2) const {
    share_statistics(rows, scale_log2);
    const int start = position - (tile - item.first_tile);
    if constexpr (config.split_tiles > 0) return end_split(run.shares, parts, start, tile, O);
    const bool begins = tile == item.first_tile, ends = tile + count == item.end_tile;
    const int first = begins ? static_cast<int>(blockIdx.x) : run.shares.block_of(start);
    const int own = static_cast<int>(blockIdx.x) - first;
    const bool whole = begins && ends;
    collect<0>(O, parts, whole ? nullptr : parts.part(first, own));
    if (whole) {
      ptx::path<"decode/sm80 whole item">();
      return;
    }
    ptx::path<"decode/sm80 part of an item">();
    // The barrier at the end of collect() orders everyone's writes before the arrival.
    const int blocks = run.shares.block_of(start + item.end_tile - item.first_tile - 1) - first + 1;
    if (thread == 0) storage.is_last = parts.arrive(first, blocks);
    sync_consumers<config>();  // everyone knows, and sees what thread 0 has seen
    if (storage.is_last) {
      ptx::path<"decode/sm80 merged parts">();
      merge(parts, 0, blocks, [&](int x) { return parts.part(first, x); });
    }
    sync_consumers<config>();  // is_last and the factors have been read
  }

  /// The end of the split that `tile` begins, of an item whose first tile is tile `start` of all.
  __device__ __forceinline__ void end_split(const Shares& shares, const Parts<config>& parts, int start, int tile,
                                            const float (&O)[1][dim_v / 8][4]) const {
    const int first = item.split_of(item.first_tile), last = item.split_of(item.end_tile - 1), own = item.split_of(tile);
    collect<0>(O, parts, first == last ? nullptr : parts.part_of_split(shares, item, start, own));
    if (first == last) return;
    // The block's splits of an item arrive together, with the last of them.
    const int block = static_cast<int>(blockIdx.x), origin = start - item.first_tile;  // of tile 0 of the keys
    if (own != last && shares.block_of(origin + (own + 1) * config.split_tiles) == block) return;
    // The barrier at the end of collect() orders everyone's writes before the arrival.
    const int first_block = shares.block_of(start), last_block = shares.block_of(origin + last * config.split_tiles);
    if (thread == 0) {
      const int own_first =
          block == first_block ? first : tile::ceil_div(shares.begin_of(block) - origin, config.split_tiles);
      storage.is_last = first_block == last_block || parts.arrive(first_block, last - first + 1, own - own_first + 1);
    }
    sync_consumers<config>();  // everyone knows, and sees what thread 0 has seen
    if (storage.is_last)
      merge(parts, first, last + 1, [&](int split) { return parts.part_of_split(shares, item, start, split); });
    sync_consumers<config>();  // is_last and the factors have been read
  }
};

}  // namespace flash_attention::decode
