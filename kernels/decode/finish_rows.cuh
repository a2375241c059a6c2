#pragma once

#include "decode/parts.cuh"
#include "decode/tiles.cuh"
#include "forward/repair.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/path.cuh"
#include "ptx/shared.cuh"
#include "tile/mma.cuh"
#include "tile/scales.cuh"
#include "tile/softmax.cuh"

// How the rows of an item leave a decode kernel: where they go, the last factor, lse, O in 16 bits, and the repair of rows
// that 0 * NaN has reached. Base of decode/merge.cuh, which merges splits, and of decode/finish.cuh.

namespace flash_attention::decode {

template <ForwardConfig config>
struct FinishRows {
  static constexpr Features features = config.features;
  static constexpr DecodeLayout layout{config};
  static constexpr int warps = config.num_warps, columns = layout.merge_columns;
  static constexpr int dim_v = DecodeLayout::columns_of(config, config.head_dim_v);
  static constexpr bool narrow = is_narrow(key_type(features));
  static constexpr bool repairs_rows = tile::Score<features>::hides;
  static constexpr bool shares_items = config.item_blocks != 1 && !config.strided_items;  // with other blocks
  using Element = ptx::Element<features.dtype>;
  using Four = ptx::Vector<float, 4>;
  using Pair = ptx::Vector<float, 2>;

  /// Of a block of a cluster (decode/cluster_merge.cuh).
  struct Mailbox {
    ptx::Mbarrier tiles_read;  // by all blocks that have a part
    ptx::Mbarrier received;    // all pieces that this block merges
  };

  struct SharedStorage {
    union {
      alignas(16) float O[layout.merge_bytes / 4];     // decode/finish.cuh
      float factors[warps][decode_max_parts(config)];  // of the parts, for the row that the warp merges
    };
    alignas(16) Pair statistics[16 * layout.row_warps][layout.key_warps];  // maximum in powers of two, sum
    int is_last;
    Mailbox mailbox;
  };

  /// By which probabilities are larger where they are multiplied by the scales of rows: of what is left, a float16 would
  /// have few bits.
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
    const int packed = item.row_tile * config.block_q + row;
    return {packed / config.group, item.kv_head_idx * config.group + packed % config.group};
  }
  __device__ __forceinline__ int num_rows() const {
    return tile::min(config.block_q, sequence.rows_q * config.group - item.row_tile * config.block_q);
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
    if constexpr (features.token_scales) return factor / P_scale;
    if constexpr (features.kv_scales)
      return factor * tile::head_scale<features>(args.V_scale, sequence.batch_idx, item.kv_head_idx);
    return factor;
  }

  __device__ __forceinline__ Element* output(const Row& row) const {
    return tile::query_rows<Element, features>(args.O, sequence, row.head_idx).row(row.query);
  }
  /// By one lane.
  __device__ __forceinline__ void write_lse(const Row& row, float lse) const {
    if (args.lse == nullptr) return;
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
    repaired_output<config>(args, sequence, row.head_idx, row.query, lse).store(output(row), 1, lane);
  }
};

}  // namespace flash_attention::decode
