#pragma once

#include "decode/parts.cuh"
#include "decode/tiles.cuh"
#include "forward/repair.cuh"
#include "ptx/path.cuh"
#include "ptx/shared.cuh"
#include "tile/mma.cuh"
#include "tile/scales.cuh"
#include "tile/softmax.cuh"

// The end of an item, or of a block's part of one: the warps that shared its keys add up what they have, some columns at a
// time, a row a warp. A whole item goes to O and lse. A part goes to the workspace, and the last block to arrive merges all
// parts, in their order.

namespace flash_attention::decode {

template <ForwardConfig config>
struct Finish {
  static constexpr Features features = config.features;
  static constexpr DecodeLayout layout{config};
  static constexpr int warps = config.num_warps, columns = layout.merge_columns;
  static constexpr int dim_v = DecodeLayout::columns_of(config, config.head_dim_v);
  static constexpr bool narrow = is_narrow(key_type(features));
  static constexpr bool careful = tile::Score<features>::hides;
  using Element = ptx::Element<features.dtype>;
  using Four = ptx::Vector<float, 4>;
  using Pair = ptx::Vector<float, 2>;

  struct SharedStorage {
    union {
      alignas(16) float O[warps][layout.warp_rows][columns + 4];
      float factors[warps][decode_max_parts(config)];  // of the parts, for the row that the warp merges
    };
    float max[warps][16];  // in powers of two
    float sum[warps][16];
    int is_last;
  };

  /// By which probabilities are larger where they are multiplied by the scales of rows: of what is left, a float16 would
  /// have few bits.
  static constexpr int lift = features.token_scales && features.dtype == Type::float16 ? 256 : 1;

  const AttentionArgs& args;
  SharedStorage& storage;
  const tile::Sequence& sequence;
  const Item<config>& item;
  int thread = threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  struct Row {
    int query;
    int head_idx;
  };
  __device__ __forceinline__ Row row_of(int row) const {
    const int packed = item.row_tile * config.block_q + row;
    return {packed / config.group, item.kv_head_idx * config.group + packed % config.group};
  }
  __device__ __forceinline__ int num_rows() const {
    return tile::min(config.block_q, sequence.rows_q * config.group - item.row_tile * config.block_q);
  }

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

  /// What the row's sums are to be multiplied by, 0 where nothing is to be seen; lse.
  __device__ __forceinline__ float finish_row(const Row& row, float max, float sum, float& lse) const {
    if (row.query >= sequence.len_q) {
      lse = -tile::infinity;
      return 0;
    }
    float sink = -tile::infinity;
    if constexpr (features.sink) sink = args.sink[row.head_idx];
    const float factor = tile::finish_row(max, sum, sink, lse);
    if constexpr (features.token_scales) return factor / lift;
    if constexpr (features.kv_scales)
      return factor * tile::head_scale<features>(args.V_scale, sequence.batch_idx, item.kv_head_idx);
    return factor;
  }

  __device__ __forceinline__ Element* output(const Row& row) const {
    return tile::query_rows<Element, features>(args.O, sequence, row.head_idx).row(row.query);
  }
  __device__ __forceinline__ void write_lse(const Row& row, float lse) const {
    if (args.lse == nullptr || lane != 0) return;
    ptx::store_global(args.lse + tile::statistics_offset<features>(args, sequence, row.head_idx) + row.query, lse);
  }
  /// Four neighbours of a row; whether all are finite.
  __device__ __forceinline__ bool write_four(const Row& row, int column, const Four& sum, float factor) const {
    float value[4], check = 0;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      value[c] = factor == 0 ? 0 : sum[c] * factor;
      check = ptx::fma(value[c], 0, check);
    }
    const ptx::Vector<unsigned, 2> packed{
        {ptx::pack<features.dtype>(value[0], value[1]), ptx::pack<features.dtype>(value[2], value[3])}};
    ptx::store_global(reinterpret_cast<ptx::Vector<unsigned, 2>*>(output(row) + column), packed);
    return check == check;
  }
  /// A row that 0 * NaN has reached, once more, touching only what is visible. By the whole warp.
  __device__ __forceinline__ void repair(const Row& row, float lse) const {
    __syncwarp();  // what is replaced has been written
    if (row.query >= sequence.len_q) return;
    ptx::path<"decode/sm80 repaired row">();
    careful_output<config>(args, sequence, row.head_idx, row.query, lse).store(output(row), 1, lane);
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
      sync_consumers<config>();  // the columns, and at first the statistics, are there
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

  /// All parts [begin, end) of the item, by a warp for each row. A lane has the same parts whatever `begin` is, and a part
  /// in which a row sees nothing changes no bit of it.
  template <typename PartAt>
  __device__ __forceinline__ void merge(const Parts<config>& parts, int begin, int end, PartAt part_at) const {
    // Parts in flight, as registers allow; those of splits have longer addresses.
    constexpr int together = config.block_q > 16 || config.head_dim_v > 128 || config.split_tiles > 0 ? 4 : 8;
    float* factors = storage.factors[warp];
    for (int row = warp; row < num_rows(); row += warps) {
      const auto load = [&](Four(&values)[together], int x, int column) {
#pragma unroll
        for (int u = 0; u < together; ++u) {
          if (x + u >= end || column >= config.head_dim_v) continue;
          const float* part = part_at(x + u) + Parts<config>::value_offset(row) + column;
          values[u] = ptx::load_global(reinterpret_cast<const Four*>(part));
        }
      };
      Four values[together];
      load(values, begin, 4 * lane);         // under the statistics
      float max = -tile::infinity, sum = 0;  // of this lane's parts, then of all
      const int own = config.split_tiles > 0 ? begin + (lane - begin % 32 + 32) % 32 : lane;  // this lane's first
      for (int x = own; x < end; x += 32) {
        const float* part = part_at(x) + parts.statistics_offset(row);
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
      __syncwarp();  // the factors are there; not found by the emulator: its shuffles order more than the GPU's do
      float lse;
      const Row place = row_of(row);
      const float factor = finish_row(place, max, sum, lse);
      write_lse(place, lse);
      bool finite = true;
      for (int column = 4 * lane; column < config.head_dim_v; column += 128) {
        Four total{};
        for (int x = begin; x < end; x += together) {
          if (x != begin) ptx::path<"decode/sm80 more parts">();
          if (x != begin || column != 4 * lane) load(values, x, column);
#pragma unroll
          for (int u = 0; u < together; ++u) {
            if (x + u >= end) continue;
#pragma unroll
            for (int c = 0; c < 4; ++c) total[c] = ptx::fma(factors[x + u - begin], values[u][c], total[c]);
          }
        }
        finite = write_four(place, column, total, factor) && finite;
      }
      if constexpr (careful) {
        if (ptx::any(!finite)) repair(place, lse);
      }
      __syncwarp();  // the factors have been read
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
      storage.is_last =
          first_block == last_block || parts.arrive(first_block, last - first + 1, own - own_first + 1);
    }
    sync_consumers<config>();  // everyone knows, and sees what thread 0 has seen
    if (storage.is_last)
      merge(parts, first, last + 1, [&](int split) { return parts.part_of_split(shares, item, start, split); });
    sync_consumers<config>();  // is_last and the factors have been read
  }
};

}  // namespace flash_attention::decode
