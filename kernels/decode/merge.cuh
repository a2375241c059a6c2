#pragma once

#include "decode/finish_rows.cuh"

// Merges the parts of an item, which several thread blocks have left in the workspace (decode/parts.cuh): a warp per row.
//
//   for each row:
//     max, sum  of all parts, a part per lane
//     O = sum over parts of exp(max of the part - max) * O of the part, some parts at a time in flight
//     O / sum -> global;  lse
//
// Or the merged rows become a part again: the first of a group, where an item has many.

namespace flash_attention::decode {

template <ForwardConfig config>
struct MergeParts : FinishRows<config> {
  using Base = FinishRows<config>;
  using Base::num_rows, Base::row_of, Base::finish_row, Base::write_lse, Base::write_four, Base::repair;
  using Base::storage, Base::warp, Base::lane, Base::warps, Base::repairs_rows;
  using typename Base::Four, typename Base::Pair, typename Base::Row;

  /// All parts [begin, end) of the item, by a warp for each row. A lane has the same parts whatever `begin` is, and a part
  /// in which a row sees nothing changes no bit of it. slot_at(x): where part x is. With `into_first` the result replaces
  /// the first of them.
  template <bool into_first = false, typename SlotAt>
  __device__ __forceinline__ void merge(const Parts<config>& parts, int begin, int end, SlotAt slot_at) const {
    constexpr bool splits = config.split_tiles > 0;
    constexpr int together = config.block_q > 16 || config.head_dim_v > 128 || splits ? 4 : 8;  // as registers allow
    float* factors = storage.factors[warp];
    for (int row = warp; row < num_rows(); row += warps) {
      int slot = 0;  // a split's takes divisions: each lane finds one of 32, for all
      const auto load = [&](Four(&values)[together], int x, int column) {
        if (splits && (x - begin) % 32 == 0) slot = slot_at(tile::min(x + lane, end - 1));
#pragma unroll
        for (int u = 0; u < together; ++u) {
          const float* part = parts.at(splits ? ptx::shuffle(slot, (x - begin) % 32 + u) : slot_at(x + u));
          if (x + u >= end || column >= config.head_dim_v) continue;
          values[u] = ptx::load_global(reinterpret_cast<const Four*>(part + Parts<config>::value_offset(row) + column));
        }
      };
      Four values[together];
      load(values, begin, 4 * lane);         // under the statistics
      float max = -tile::infinity, sum = 0;  // of this lane's parts, then of all
      const int own = config.split_tiles > 0 ? begin + (lane - begin % 32 + 32) % 32 : begin + lane;  // this lane's first
      for (int x = own; x < end; x += 32) {
        const float* part = parts.at(slot_at(x)) + parts.statistics_offset(row);
        const Pair statistics = ptx::load_global(reinterpret_cast<const Pair*>(part));
        const float larger = ptx::max(max, statistics[0]);
        if (larger != -tile::infinity) {
          sum = sum * ptx::exp2(max - larger) + statistics[1] * ptx::exp2(statistics[0] - larger);
        } else {
          sum += statistics[1];  // NaN where all scores are
        }
        max = larger;
        factors[x - begin] = statistics[0];
      }
      const float own_max = max;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) max = ptx::max(max, ptx::shuffle_xor(max, step));
      const float reference = max == -tile::infinity ? 0 : max;
      sum *= ptx::exp2(own_max - reference);
      for (int x = own; x < end; x += 32) factors[x - begin] = ptx::exp2(factors[x - begin] - reference);
#pragma unroll
      for (int step = 1; step < 32; step *= 2) sum += ptx::shuffle_xor(sum, step);
      __syncwarp();  // the factors are ready; not found by the emulator: its shuffles order more than the GPU's do
      float lse = 0, factor = 1;
      const Row place = row_of(row);
      if constexpr (into_first) {
        float* part = parts.at(slot_at(begin)) + parts.statistics_offset(row);
        if (lane == 0) ptx::store_global(reinterpret_cast<Pair*>(part), Pair{{max, sum}});
      } else {
        factor = finish_row(place, max, sum, lse);
        if (lane == 0) write_lse(place, lse);
      }
      bool finite = true;
      for (int first = 0; first < config.head_dim_v; first += 128) {
        const int column = first + 4 * lane;
        Four total{};
        for (int x = begin; x < end; x += together) {
          if (x != begin) ptx::path<"decode/sm80 more parts">();
          if (x != begin || first != 0) load(values, x, column);
#pragma unroll
          for (int u = 0; u < together; ++u) {
            if (x + u >= end) continue;
#pragma unroll
            for (int c = 0; c < 4; ++c) total[c] = ptx::fma(factors[x + u - begin], values[u][c], total[c]);
          }
        }
        if constexpr (into_first) {
          float* part = parts.at(slot_at(begin)) + Parts<config>::value_offset(row) + column;
          if (column < config.head_dim_v) ptx::store_global(reinterpret_cast<Four*>(part), total);
        } else {
          if (column < config.head_dim_v) finite = write_four(place, column, total, factor) && finite;
        }
      }
      if constexpr (repairs_rows && !into_first) {
        if (ptx::any(!finite)) repair(place, lse);
      }
      __syncwarp();  // the factors have been read
    }
  }
};

}  // namespace flash_attention::decode
