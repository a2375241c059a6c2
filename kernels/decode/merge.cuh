#pragma once

// The workspace of blocks that share an item: their parts of the result, and the counters by which the last block to arrive
// knows that it is the last. It merges the parts.
//
// DecodeRegion::arrivals: a word for each block. It counts the arrivals for the item that is cut at the end of this block's
// run.
//
// DecodeRegion::parts: two parts for each block: one of the item that began before its run, one of the last item that it
// began. With fixed splits a block has more parts of each: as many as an item may have there. second_part and second_block
// are the places of the second part and of the second block's parts, which give the distances.
//
// The words need no initialisation: a memset would take as long as a short call. A word has 48 bits of tag, computed from
// its address, and 16 bits of count. Old content of the workspace equals the tag only with a chance of 2^-48. If the tag is
// not there, the first block that looks writes it with a count of 0. The last block to arrive resets the count for the next
// call.

#include "abi/decode.h"
#include "decode/schedule.cuh"
#include "decode/tiles.cuh"
#include "decode/turned.cuh"
#include "forward/repair.cuh"
#include "ptx/atomic.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/path.cuh"
#include "ptx/registers.cuh"
#include "ptx/shared.cuh"
#include "tile/fixed_order.cuh"
#include "tile/mma.cuh"
#include "tile/scales.cuh"
#include "tile/softmax.cuh"
#include "tile/workspace.cuh"

namespace flash_attention::decode {

template <ForwardConfig config>
struct Parts {
  static constexpr bool splits = config.split_tiles > 0;
  using Word = unsigned long long;

  Word* words;
  float* parts;
  int rows = config.block_q;  // of a part
  int many = 1;               // parts of each of a block's two items

  __device__ __forceinline__ static long long offset(const AttentionArgs& args, DecodeRegion region) {
    return args.workspace_offsets[static_cast<int>(region)];
  }

  __device__ __forceinline__ explicit Parts(const AttentionArgs& args)
      : words(tile::workspace<Word>(args, DecodeRegion::arrivals)),
        parts(tile::workspace<float>(args, DecodeRegion::parts)) {
    if constexpr (config.row_grid || config.head_grid ||
                  config.item_blocks > 0) {  // separate words and parts for each blockIdx.y and z
      const int before = static_cast<int>(blockIdx.y + gridDim.y * blockIdx.z) * ptx::fresh_grid_size();
      words += before;
      parts += 2ll * before * floats();
    }
    if constexpr (splits) {
      const long long bytes = offset(args, DecodeRegion::second_part) - offset(args, DecodeRegion::parts);
      rows = static_cast<int>(bytes / decode_part_bytes(config, 1));
      many = static_cast<int>((offset(args, DecodeRegion::second_block) - offset(args, DecodeRegion::parts)) / (2 * bytes));
    }
  }

  __device__ __forceinline__ Word tag_of(int block) const {
    Word tag = reinterpret_cast<Word>(words + block) * 0x9E3779B97F4A7C15ull;
    tag = (tag ^ tag >> 29) * 0xBF58476D1CE4E5B9ull;
    return tag & ~Word{0xffff};
  }

  /// Called by each block before its arrive(): makes sure that the word counts from 0.
  __device__ __forceinline__ void prepare(int block) const {
    const Word found = ptx::load_relaxed(words + block);
    // If this fails, another block was faster.
    if ((found & ~Word{0xffff}) != tag_of(block)) ptx::compare_exchange(words + block, found, tag_of(block));
  }

  /// Counts `own` parts of this block. Returns whether all of `count` parts have arrived. If so, what the other blocks
  /// wrote before their arrival is visible here.
  __device__ __forceinline__ bool arrive(int block, int count, int own = 1) const {
    const Word before = ptx::atomic_add_acq_rel(words + block, static_cast<Word>(own));
    if (static_cast<int>(before & 0xffff) + own < count) return false;
    ptx::store_global(words + block, tag_of(block));
    return true;
  }

  /// The address of part `slot`, counted over all blocks.
  __device__ __forceinline__ float* at(int slot) const { return parts + slot * floats(); }
  /// The slot of part x of an item that block `first` begins.
  __device__ __forceinline__ static int slot_of(int first, int x) { return 2 * (first + x) + (x == 0 ? 1 : 0); }
  /// The slot of a split of an item whose first tile is tile `start` of all.
  __device__ __forceinline__ int slot_of_split(const Shares& shares, const Item<config>& item, int start, int split) const {
    const int tile = tile::max(item.first_tile, split * config.split_tiles), position = start + tile - item.first_tile;
    const int first = shares.block_of(start), block = shares.block_of(position);
    const int index =
        block == first ? split - item.split_of(item.first_tile) : (position - shares.begin_of(block)) / config.split_tiles;
    return (2 * block + (block == first ? 1 : 0)) * many + index;
  }
  __device__ __forceinline__ static long long value_offset(int row) {
    return static_cast<long long>(row) * config.head_dim_v;
  }
  __device__ __forceinline__ long long statistics_offset(int row) const {
    return static_cast<long long>(splits ? rows : config.block_q) * config.head_dim_v + 2 * row;
  }

 private:
  __device__ __forceinline__ long long floats() const {
    return decode_part_bytes(config, splits ? rows : config.block_q) / 4;
  }
};

// The output of an item's rows: addresses, the last factor, lse, O in 16 bits, and the repair of rows that 0 * NaN has
// reached. merge_parts, ClusterMerge and Finish use it.

/// What a warp keeps for its rows: statistics, and sums of O.
template <ForwardConfig config>
struct RowSums {
  using State = tile::RowState;
  using Sums = float[1][DecodeLayout::value_columns(config) / 8][4];
};
template <ForwardConfig config>
requires(has_groups(key_type(config.features))) struct RowSums<config> {
  using State = TurnedRows<Turned<config>::row_tiles>;
  using Sums = float[1][Turned<config>::sum_blocks][4];
};

template <ForwardConfig config>
struct FinishRows {
  static constexpr Features features = config.features;
  static constexpr DecodeLayout layout{config};
  static constexpr int warps = config.num_warps, columns = layout.merge_columns;
  static constexpr int dim_v = DecodeLayout::value_columns(config);  // of a warp
  static constexpr bool narrow = is_narrow(key_type(features)), grouped = has_groups(key_type(features));
  using State = typename RowSums<config>::State;
  using Sums = typename RowSums<config>::Sums;
  // The rows of a list see the same keys: nothing hidden has been multiplied.
  static constexpr bool repairs_rows = tile::Visibility<features>::hides && !features.key_list;
  static constexpr bool shares_items = config.item_blocks != 1 && !config.strided_items;  // with other blocks
  using Element = ptx::Element<features.dtype>;
  using Four = ptx::Vector<float, 4>;
  using Pair = ptx::Vector<float, 2>;

  /// Barriers of a block of a cluster (decode/cluster_merge.cuh).
  struct Mailbox {
    ptx::Mbarrier tiles_read;  // all blocks that have a part arrive here
    ptx::Mbarrier received;    // counts the bytes of all pieces that this block merges
  };

  struct SharedStorage {
    union {
      alignas(16) float O[layout.merge_bytes / 4];  // decode/finish.cuh
      float factors[warps][decode_max_factors(config)];  // of the parts, for the row that the warp merges
    };
    alignas(16) Pair statistics[16 * layout.row_warps][layout.key_warps];  // maximum in powers of two, sum
    int is_last;
    Mailbox mailbox;
  };

  /// The factor of probabilities if they are multiplied by scales of rows. Without it the products may be so small that
  /// float16 keeps few bits.
  static constexpr int P_scale = features.token_scales && features.dtype == Type::float16 ? 256 : 1;

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
    const int packed = item.first_row() + row;
    return {packed / config.group, item.kv_head_idx * config.group + packed % config.group};
  }
  __device__ __forceinline__ int num_rows() const {
    return item.end_row(sequence.rows_q * config.group) - item.first_row();
  }

  /// Returns the factor for the row's sums, 0 if the row sees no key; also computes lse.
  __device__ __forceinline__ float finish_row(const Row& row, float max, float sum, float& lse) const {
    return finish_row(row, lse, [&](float sink) { return tile::finish_row(max, sum, sink, lse); });
  }
  /// The same in the fixed order, in which the maximum is in units of the scores.
  __device__ __forceinline__ float finish_row(const Row& row, float max, float sum, float scale_log2, float& lse) const {
    return finish_row(row, lse, [&](float sink) { return tile::finish_total(max, sum, scale_log2, sink, lse); });
  }
  template <typename Finish>
  __device__ __forceinline__ float finish_row(const Row& row, float& lse, const Finish& finish) const {
    if (row.query >= sequence.len_q) {
      lse = -tile::infinity;
      return 0;
    }
    float sink = -tile::infinity;
    if constexpr (features.sink) sink = args.sink[row.head_idx];
    const float factor = finish(sink);
    if constexpr (features.token_scales) return factor / P_scale;
    if constexpr (features.kv_scales)
      return factor * tile::head_scale<features>(args.V_scale, sequence.batch_idx, item.kv_head_idx);
    return factor;
  }

  __device__ __forceinline__ Element* output(const Row& row) const {
    return tile::query_rows<Element, features>(args.O, sequence, row.head_idx).row(row.query);
  }
  /// Called by one lane.
  __device__ __forceinline__ void write_lse(const Row& row, float lse) const {
    if (args.lse == nullptr) return;
    ptx::store_global(args.lse + tile::statistics_offset<features>(args, sequence, row.head_idx) + row.query, lse);
  }
  /// With lists: writes the largest score, computed from the largest exponent of two. Called by one lane.
  __device__ __forceinline__ void write_row_max(const Row& row, float max_log2) const {
    if constexpr (features.key_list) {
      if (args.row_max == nullptr) return;
      constexpr float ln_2 = 0.693147180559945309f;
      ptx::store_global(args.row_max + tile::statistics_offset<features>(args, sequence, row.head_idx) + row.query,
                        row.query < sequence.len_q ? max_log2 * ln_2 : -tile::infinity);
    }
  }
  /// Writes four neighbouring columns of a row; returns whether all are finite.
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
  /// Computes a row that 0 * NaN has reached again, from visible keys only. Called by the whole warp.
  __device__ __forceinline__ void repair(const Row& row, float lse) const {
    __syncwarp();  // all lanes have written what is replaced now
    if (row.query >= sequence.len_q) return;
    ptx::path<"decode/sm80 repaired row">();
    repaired_output<config>(args, sequence, row.head_idx, row.query, lse).store(output(row), 1, lane);
  }
};

// Merges the parts of an item that several thread blocks have left in the workspace. One warp for each row:
//
//   for each row:
//     max and sum over all parts, a part a lane
//     O = sum over parts of exp(max of the part - max) * O of the part; the loads of several parts are in flight
//     O / sum -> global;  lse
//
// If an item has many parts, groups of them are merged first, and the result replaces the first part of the group.

/// Merges parts [begin, end) of the item. slot_at(x): the slot of part x. into_first: the result replaces the
/// first part.
template <bool into_first = false, ForwardConfig config, typename SlotAt>
__device__ __forceinline__ void merge_parts(const FinishRows<config>& out, const Parts<config>& parts, int begin, int end,
                                            SlotAt slot_at) {
  using Rows = FinishRows<config>;
  using Four = typename Rows::Four;
  using Pair = typename Rows::Pair;
  using Row = typename Rows::Row;
  // A wide head has few rows, and each takes long. So two warps have half of its columns each, unless one warp must see
  // the whole row.
  constexpr bool wide = DecodeLayout(config).column_warps > 1 && !config.features.latent;
  constexpr int together =  // as many as registers allow
      wide ? 8 : (config.head_dim_v > 128 ? 2 : (config.block_q > 16 ? 4 : 8));
  constexpr bool halves = wide && !Rows::repairs_rows && !into_first;
  constexpr int half_columns = tile::round_up(tile::ceil_div(config.head_dim_v, 2), 128);
  float* factors = out.storage.factors[out.warp];
  for (int unit = out.warp; unit < out.num_rows() * (halves ? 2 : 1); unit += Rows::warps) {
    const int row = halves ? unit / 2 : unit, first_column = halves ? unit % 2 * half_columns : 0;
    const int end_column = halves ? tile::min(first_column + half_columns, config.head_dim_v) : config.head_dim_v;
    const auto load = [&](Four(&values)[together], int x, int column) {
#pragma unroll
      for (int u = 0; u < together; ++u) {
        const float* part = parts.at(slot_at(x + u));
        if (x + u >= end || column >= config.head_dim_v) continue;
        values[u] = ptx::load_global(reinterpret_cast<const Four*>(part + Parts<config>::value_offset(row) + column));
      }
    };
    Four values[together];
    load(values, begin, first_column + 4 * out.lane);  // in flight while the statistics are merged
    float max = -tile::infinity, sum = 0;              // over this lane's parts, then over all
    const int own = begin + out.lane;                  // this lane's first
    for (int x = own; x < end; x += 32) {
      const float* part = parts.at(slot_at(x)) + parts.statistics_offset(row);
      const Pair statistics = ptx::load_global(reinterpret_cast<const Pair*>(part));
      const float larger = ptx::max(max, statistics[0]);
      if (larger != -tile::infinity) {
        sum = sum * ptx::exp2(max - larger) + statistics[1] * ptx::exp2(statistics[0] - larger);
      } else {
        sum += statistics[1];  // keeps NaN if all scores are NaN
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
    __syncwarp();  // the factors are written (the emulator does not check: its shuffles order memory, too)
    float lse = 0, factor = 1;
    const Row place = out.row_of(row);
    if constexpr (into_first) {
      float* part = parts.at(slot_at(begin)) + parts.statistics_offset(row);
      if (out.lane == 0) ptx::store_global(reinterpret_cast<Pair*>(part), Pair{{max, sum}});
    } else {
      factor = out.finish_row(place, max, sum, lse);
      if (out.lane == 0 && first_column == 0) out.write_lse(place, lse), out.write_row_max(place, max);
    }
    bool finite = true;
    for (int first = first_column; first < end_column; first += 128) {
      const int column = first + 4 * out.lane;
      Four total{};
      for (int x = begin; x < end; x += together) {
        if (x != begin) ptx::path<"decode/sm80 more parts">();
        if (x != begin || first != first_column) load(values, x, column);
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
        if (column < config.head_dim_v) finite = out.write_four(place, column, total, factor) && finite;
      }
    }
    if constexpr (Rows::repairs_rows && !into_first) {
      if (ptx::any(!finite)) out.repair(place, lse);
    }
    __syncwarp();  // the factors have been read
  }
}

/// Merges the segments [begin, end) of an item in the fixed order: one after the other, by the formula of tile::RowTotal.
/// Maxima and factors of 32 segments are computed at a time, a segment a lane: a maximum has no order.
template <ForwardConfig config, typename SlotAt>
__device__ __forceinline__ void merge_in_order(const FinishRows<config>& out, const Parts<config>& parts, int begin, int end,
                                               float scale_log2, SlotAt slot_at) {
  using Rows = FinishRows<config>;
  using Four = typename Rows::Four;
  using Pair = typename Rows::Pair;
  constexpr int chunks = tile::ceil_div(config.head_dim_v, 128), together = chunks > 1 ? 4 : 8;
  for (int row = out.warp; row < out.num_rows(); row += Rows::warps) {
    Four total[chunks] = {};
    tile::RowTotal rows;
    for (int first = begin; first < end; first += 32) {
      const int count = tile::min(32, end - first), slot = slot_at(tile::min(first + out.lane, end - 1));
      Pair statistics{{-tile::infinity, 0}};
      if (out.lane < count)
        statistics = ptx::load_global(reinterpret_cast<const Pair*>(parts.at(slot) + parts.statistics_offset(row)));
      float raised = statistics[0];  // the maximum of this lane's segment and all before it
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const float earlier = ptx::shuffle_up(raised, step);
        if (out.lane >= step) raised = ptx::max(raised, earlier);
      }
      raised = ptx::max(raised, rows.max);
      float before = ptx::shuffle_up(raised, 1);
      if (out.lane == 0) before = rows.max;
      const tile::RowTotal::Factors own{tile::factor_of_raise(before, raised, scale_log2),
                                        tile::factor_of_raise(statistics[0], raised, scale_log2)};
      rows.max = ptx::shuffle(raised, 31);
      for (int x = 0; x < count; x += together) {
        Four values[together][chunks];
#pragma unroll
        for (int u = 0; u < together; ++u) {
          const float* part = parts.at(ptx::shuffle(slot, tile::min(x + u, 31))) + Parts<config>::value_offset(row);
#pragma unroll
          for (int c = 0; c < chunks; ++c) {
            const int column = 128 * c + 4 * out.lane;
            if (x + u < count && column < config.head_dim_v)
              values[u][c] = ptx::load_global(reinterpret_cast<const Four*>(part + column));
          }
        }
#pragma unroll
        for (int u = 0; u < together; ++u) {
          const int segment = tile::min(x + u, 31);
          const tile::RowTotal::Factors factors{ptx::shuffle(own.before, segment), ptx::shuffle(own.segment, segment)};
          const float sum = ptx::shuffle(statistics[1], segment);
          if (x + u >= count) continue;
          rows.sum = tile::RowTotal::combine(rows.sum, sum, factors);
#pragma unroll
          for (int c = 0; c < chunks; ++c) {
#pragma unroll
            for (int e = 0; e < 4; ++e)
              total[c][e] = tile::RowTotal::combine(total[c][e], values[u][c][e], factors);
          }
        }
      }
    }
    float lse = 0;
    const typename Rows::Row place = out.row_of(row);
    const float factor = out.finish_row(place, rows.max, rows.sum, scale_log2, lse);
    if (out.lane == 0) out.write_lse(place, lse);
    bool finite = true;
#pragma unroll
    for (int c = 0; c < chunks; ++c) {
      const int column = 128 * c + 4 * out.lane;
      if (column < config.head_dim_v) finite = out.write_four(place, column, total[c], factor) && finite;
    }
    if constexpr (Rows::repairs_rows) {
      if (ptx::any(!finite)) out.repair(place, lse);
    }
  }
}

}  // namespace flash_attention::decode
