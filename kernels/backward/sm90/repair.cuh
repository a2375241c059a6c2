#pragma once

// Repairs gradients of keys that 0 * NaN reached in a product of backward/sm90. P and dS are 0 if a query does not see
// a key, or if dropout dropped it; but dO and Q of that query may hold NaN or Inf. The main loop has no registers to
// check them. This kernel runs after it: it computes the keys again that were multiplied with such a query without
// seeing it.
//
// A warp takes 64 keys of one key head at a time:
//
//     for each query head of the group, each query tile at an edge of the mask:
//       [skip it if prepare has flagged no row of it];  is a row not finite?      is_reached
//     if any was:  dK and dV of each key again, over visible pairs only           repair_key (backward/repair.cuh)
//
// Nearly always prepare has flagged nothing, and the kernel only reads flags. It must do so quickly, since it runs in
// every call. If only a part of a pass runs there are no flags, and the kernel reads the statistics of the queries
// instead.

#include "backward/repair.cuh"
#include "backward/sm90/prepare.cuh"
#include "ptx/path.cuh"

namespace flash_attention {
namespace backward_sm90 {

/// has_flags: prepare has flagged the query tiles that may hold NaN or Inf.
template <BackwardConfig config, bool has_flags>
struct Repairer {
  static constexpr Features features = config.features;
  using Element = ptx::Element<features.dtype>;

  const AttentionArgs& args;
  const tile::Sequence sequence;
  const int kv_head_idx;
  const int kv_begin;  // of the tile
  const int lane = threadIdx.x % 32;

  __device__ __forceinline__ const float* delta_of(int head_idx) const {
    return workspace<float>(args, Region::delta) + head_idx * padded_rows(args) + padded_start(args, sequence);
  }

  // Flags assume that the lse of an empty row is -inf. With a sink it is not.
  static constexpr bool reads_flags = has_flags && !features.sink;

  /// The flags of the head's tiles of queries, which prepare wrote.
  __device__ __forceinline__ const unsigned* nonfinite_flags(int head_idx) const {
    return nonfinite_flags_of(args, head_idx * padded_rows(args) + padded_start(args, sequence));
  }
  __device__ __forceinline__ bool may_be_nonfinite(int head_idx) const {
    bool result = false;
    for (int tile_idx = lane; tile_idx * tile_rows < sequence.rows_q; tile_idx += 32)
      result = result || nonfinite_flags(head_idx)[tile_idx] != 0;
    return ptx::any(result);
  }

  /// An upper bound of the lse of a query that sees no key. With a sink, that lse is the logit of the sink, up to
  /// rounding.
  __device__ __forceinline__ float lse_of_empty_row(int head_idx) const {
    if constexpr (!features.sink) return -tile::infinity;
    const float sink = args.sink[head_idx];
    return sink + 1e-3f * ptx::max(1.0f, ptx::max(sink, -sink));
  }

  /// Whether NaN or Inf in Q or dO of query i can be in a product. If Q is not finite, neither is lse, unless the query
  /// sees no key or only keys with a score of -inf. If dO is not finite, neither is delta.
  __device__ __forceinline__ bool is_nonfinite(int head_idx, int i) const {
    const float lse = args.lse[tile::statistics_offset<features>(args, sequence, head_idx) +
                               tile::statistic_of<features>(args, i)];
    const float delta = delta_of(head_idx)[i];
    if (!(lse < tile::infinity) || delta - delta != 0.0f) return true;
    if (lse > lse_of_empty_row(head_idx)) return false;
    const Element* Q_row = tile::query_rows<const Element, features>(args, args.Q, sequence, head_idx).row(i);
    float check = 0;
    for (int d = 0; d < config.head_dim; ++d) check = ptx::fma(ptx::to_float(Q_row[d]), 0.0f, check);
    return check != 0.0f;
  }

  /// Whether the main loop has multiplied keys of the tile with such a query of the head, though some of these keys are
  /// hidden from it.
  __device__ __forceinline__ bool is_reached(int head_idx) const {
    if (reads_flags && !may_be_nonfinite(head_idx)) return false;
    const tile::Visibility<features> sight(args, sequence, head_idx);
    // The main loop reads all queries that any key of its block sees.
    const auto tiles = sight.template query_tiles<tile_rows, config.block_kv>(kv_begin / config.block_kv * config.block_kv);
#pragma unroll 1
    for (int tile_idx = tiles.begin; tile_idx < tiles.end; ++tile_idx) {
      if (reads_flags && nonfinite_flags(head_idx)[tile_idx] == 0) continue;
      const int q_begin = tile_idx * tile_rows, block_begin = kv_begin / config.block_kv * config.block_kv;
      // the loop has no such step
      if (sight.template masks_hide<tile_rows, config.block_kv>(q_begin, block_begin)) continue;
      if (!features.dropout && sight.template all_visible<tile_rows, tile_rows>(q_begin, kv_begin)) {
        if constexpr (features.window_left || tile::TileMap<features>::present) continue;
        return false;  // later queries see no less
      }
      bool nonfinite = false;
      for (int i = q_begin + lane; i < tile::min(q_begin + tile_rows, sequence.len_q); i += 32) {
        if constexpr (features.stacked_heads != 0) {
          if (!tile::has_head<features>(args, i)) continue;
        }
        nonfinite = nonfinite || is_nonfinite(head_idx, i);
      }
      if (ptx::any(nonfinite)) return true;
    }
    return false;
  }

  __device__ __forceinline__ void run() const {
    bool reached = false;
#pragma unroll 1
    for (int head = 0; head < args.group && !reached; ++head) reached = is_reached(kv_head_idx * args.group + head);
    if (!reached) return;
    ptx::path<"backward/sm90 repaired keys">();
#pragma unroll 1
    for (int j = kv_begin; j < tile::min(kv_begin + tile_rows, sequence.rows_kv); ++j)
      repair_key<config>(
          args, sequence, kv_head_idx, j, [&](int head_idx) { return delta_of(head_idx); }, args.keep_scale);
  }
};

}  // namespace backward_sm90

/// For one of `blocks` blocks, which are the blocks of the grid from `first` on.
template <abi::BackwardConfig config, bool has_flags>
__device__ __forceinline__ void backward_sm90_repair_keys(const abi::AttentionArgs& args, int blocks, int first = 0) {
  using namespace backward_sm90;
  const int warps = blockDim.x / 32;
  const int num_tiles = tile::ceil_div(args.seq_kv, tile_rows), num_tasks = num_tiles * args.heads_kv * args.batch;
#pragma unroll 1
  for (int task = (blockIdx.x - first) * warps + threadIdx.x / 32; task < num_tasks; task += blocks * warps) {
    const auto block = tile::key_block(task, num_tiles, args.heads_kv);
    const auto sequence = tile::make_sequence<config.features>(args, block.batch_idx);
    if (block.tile_idx * tile_rows >= sequence.rows_kv) continue;
    if (splits_first<config>(args) && block.tile_idx * tile_rows < config.block_kv) continue;  // repair_first_keys
    Repairer<config, has_flags>{args, sequence, block.head_idx, block.tile_idx * tile_rows}.run();
  }
}

/// The number of blocks that convert the sums of first keys, 64 of a head each, if tasks share their queries.
template <abi::BackwardConfig config>
__device__ __forceinline__ int first_key_blocks(const abi::AttentionArgs& args) {
  using namespace backward_sm90;
  return splits_first<config>(args) ? config.block_kv / tile_rows * args.heads_kv * args.batch : 0;
}
/// For one of these blocks: its four warps convert, one of them repairs.
template <abi::BackwardConfig config>
__device__ __forceinline__ void backward_sm90_repair_first_keys(const abi::AttentionArgs& args) {
  using namespace backward_sm90;
  const auto block = tile::key_block(blockIdx.x, config.block_kv / tile_rows, args.heads_kv);
  const auto sequence = tile::make_sequence<config.features>(args, block.batch_idx);
  const int kv_begin = block.tile_idx * tile_rows, warp = static_cast<int>(threadIdx.x) / 32;
  const int row = kv_begin + warp * (tile_rows / 4);
  convert_key_rows<config>(args, sequence, block.head_idx, row,
                           first_keys_row<config>(args, sequence, block.head_idx) + row, threadIdx.x % 32);
  __syncthreads();  // all rows are written before some are written again
  if (warp == 0 && kv_begin < sequence.rows_kv) Repairer<config, true>{args, sequence, block.head_idx, kv_begin}.run();
}

/// After a whole pass, and after a part of one.
template <abi::BackwardConfig config>
__device__ __forceinline__ void backward_sm90_repair(const abi::AttentionArgs& args) {
  backward_sm90_repair_keys<config, true>(args, gridDim.x);
}
template <abi::BackwardConfig config>
__device__ __forceinline__ void backward_sm90_repair_part(const abi::AttentionArgs& args) {
  backward_sm90_repair_keys<config, false>(args, gridDim.x);
}

/// Both ends of a pass in one launch: the last blocks of the grid convert dQ, those before them repair, and the first
/// ones handle first keys.
template <abi::BackwardConfig config>
__device__ __forceinline__ void backward_sm90_finish(const abi::AttentionArgs& args) {
  using namespace backward_sm90;
  const int row_tiles =
      tile::ceil_div(args.seq_q, tile_rows) * (args.heads_q * args.batch - (config.early_dq ? args.early_heads : 0));
  const int blocks = static_cast<int>(gridDim.x) - row_tiles, first = first_key_blocks<config>(args);
  const int block_idx = static_cast<int>(blockIdx.x);
  if (block_idx >= blocks) return backward_sm90_convert<config>(args);
  if (block_idx < first) return backward_sm90_repair_first_keys<config>(args);
  backward_sm90_repair_keys<config, true>(args, blocks - first, first);
}

}  // namespace flash_attention
