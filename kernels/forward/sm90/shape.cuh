#pragma once

// Sizes of forward/sm90 that follow from its configuration. How the loop works (ForwardLoop) is the planner's decision.

#include "abi/args.h"
#include "abi/config.h"
#include "abi/forward_sm90.h"
#include "abi/tensor_maps.h"
#include "ptx/convert.cuh"
#include "ptx/wgmma.cuh"
#include "tile/score.cuh"

namespace flash_attention::forward_sm90 {

using namespace abi;

using namespace abi::forward_sm90_maps;

constexpr int wg_threads = 128;
constexpr int wg_rows = 64;    // query rows of a warpgroup: the M of its products
constexpr int chunk_dim = 64;  // a tile is stored in chunks of 64 columns: 128 bytes, the width of the swizzle

/// The type of a scheduler unit's number. Mask bits leave little shared memory, so there it is small.
template <bool is_small>
struct UnitNumberOf {
  using Type = int;
};
template <>
struct UnitNumberOf<true> {
  using Type = unsigned short;
};
template <bool is_small>
using UnitNumber = typename UnitNumberOf<is_small>::Type;

template <ForwardConfig config>
struct Shape {
  static constexpr Features features = config.features;
  static constexpr Type type = features.dtype;
  using Element = ptx::Element<type>;

  // Mask data or a program choose the KV blocks. Then the producer publishes with each K which block it is.
  static constexpr bool listed = tile::TileMap<features>::present;
  static constexpr ForwardLoop loop = config.loop;
  static constexpr bool mask_words = loop.mask_words != MaskWords::none;
  static constexpr bool makes_words = loop.mask_words == MaskWords::own;
  static constexpr bool list_bits = features.list_bits != 0;  // a row sees all keys of a block that its list names, or none
  static constexpr bool keeps_tested = loop.keeps_tested;
  static constexpr int tiles_kept = forward_sm90_tiles_kept(config);
  static constexpr bool skips_listed = loop.skips_listed;
  using Unit = UnitNumber<mask_words>;  // of the scheduler
  // The next tile is claimed late, before the last KV block of the current one: a tile claimed early would keep the other
  // thread blocks waiting at the end of the launch. Small tiles of masks have few blocks; there it is claimed at once.
  static constexpr bool claims_late = config.dynamic_scheduler && !(listed && config.block_q == 64);
  // A separate warp finds the tiles and their blocks: for one thread that takes longer than the products of a few blocks.
  // If the other warps of the producer warpgroup compute mask bits, none of them is free for it.
  static constexpr bool finds_ahead = listed && !makes_words && !forward_sm90_is_wide(config.head_dim, config.head_dim_v);
  static constexpr int block_q = config.block_q, block_kv = config.block_kv, stages = config.num_stages;

  // Wide heads: two warpgroups share the same rows. Each computes half of a block's keys and half of O's columns.
  static constexpr bool wide = forward_sm90_is_wide(config.head_dim, config.head_dim_v);
  static constexpr int cluster = forward_sm90_cluster(config.head_dim, config.head_dim_v, block_q);  // blocks
  static constexpr int row_groups = block_q / cluster / wg_rows;                                     // of 64 query rows
  static constexpr int warpgroups = forward_sm90_warpgroups(config);  // consumers; one more is the producer
  static constexpr int score_keys = wide ? block_kv / 2 : block_kv;   // of a block, whose scores a warpgroup has
  static constexpr int threads = (warpgroups + 1) * wg_threads;

  static constexpr bool pingpong = loop.pingpong;

  // Sums are in the fixed order of invariant bits, in segments of so many blocks: forward/sm90/ordered_loop.cuh.
  static constexpr bool ordered = has_fixed_order(config);
  static constexpr int segment_blocks = config.split_tiles;
  // Rows keep the reference of a segment's first block, and a tile for which that was wrong is repeated. With ALiBi the last
  // keys have the largest scores.
  static constexpr bool keeps_reference = ordered && !features.alibi && !features.mask;

  // Tiles round up to whole chunks: TMA reads columns past the head dimension as zero and does not store them.
  static constexpr int chunks = tile::ceil_div(config.head_dim, chunk_dim);
  static constexpr int chunks_v = tile::ceil_div(config.head_dim_v, wide ? 2 * chunk_dim : chunk_dim);  // of a warpgroup
  static constexpr int steps_qk = tile::ceil_div(config.head_dim, 16);
  static constexpr int steps_pv = block_kv / 16;
  static constexpr int width_v = wide ? chunks_v * chunk_dim : tile::round_up(config.head_dim_v, 32);  // the N of P V

  static constexpr int value_rows =  // keys of a stage of V
      forward_sm90_value_rows(config.head_dim, config.head_dim_v, block_kv);
  static constexpr int q_bytes = wg_rows * chunks * chunk_dim * 2;  // of one warpgroup
  static constexpr int k_bytes = block_kv * chunks * chunk_dim * 2;
  static constexpr int v_bytes = block_kv * chunks_v * chunk_dim * 2;
  static constexpr int q_stages = forward_sm90_layout(config).q_stages;
  static constexpr int o_chunks = forward_sm90_layout(config).o_chunks;
  static constexpr int totals_bytes = forward_sm90_layout(config).totals_bytes;

  // Biases loaded by TMA: tiles of 64 queries in chunks of 64 keys like those of Q, or of 32 keys with half the swizzle.
  static constexpr int bias_stages = config.bias_stages;
  static constexpr int bias_keys = block_kv < chunk_dim ? block_kv : chunk_dim;
  static constexpr int bias_bytes = wg_rows * block_kv * 2;  // of one warpgroup

  static constexpr int load_registers = forward_sm90_registers(config).load;  // setmaxnreg
  static constexpr int attend_registers = forward_sm90_registers(config).attend;
  static constexpr bool holds_queries = loop.holds_queries;
  // The next tile is published while the keys of this one are loaded: its Q has a stage, or that of this tile is released as
  // soon as Q is in registers.
  static constexpr bool releases_early = has_fixed_order(config) && holds_queries && q_stages == 1;
  static constexpr bool publishes_early = q_stages == 2 || releases_early;
  static constexpr bool uniform_by_vote = loop.uniform_by_vote;

  // Keys before the first visible one may exist: a window or left padding hides them.
  static constexpr bool left_edge = features.window_left || features.left_padding;

  static constexpr bool forwards = loop.key_order == KeyOrder::forwards;
  static constexpr bool from_diagonal = loop.key_order == KeyOrder::from_diagonal;

  // Rows of V after the last visible key may hold anything, also NaN. TMA zeroes rows past the end of the tensor; rows
  // within the tensor must be zeroed by the kernel.
  static constexpr bool hidden_rows = features.packed || features.seqused_kv || features.key_lengths || features.paged;

  // The row group and the first chunk of O's columns of a warpgroup.
  __device__ __forceinline__ static constexpr int row_group(int warpgroup) { return wide ? 0 : warpgroup; }
  __device__ __forceinline__ static constexpr int first_chunk(int warpgroup) { return wide ? warpgroup * chunks_v : 0; }

  static_assert(config.head_dim % 8 == 0 && config.head_dim <= 576 && config.head_dim_v % 8 == 0 &&
                config.head_dim_v <= 512);
  static_assert(!wide || (row_groups == 1 && cluster <= 2 && block_kv == forward_sm90_wide_keys));
  static_assert(!config.split_keys || (forwards && !listed && !wide && !features.touches_scores() && !features.sink &&
                                       !features.packed && !features.seqused_q && !config.pair_tiles));
  static_assert(!list_bits || (features.list_bits == block_kv && !mask_words && !wide && !features.packed));
  static_assert(!ordered || (forwards && !listed && !wide && !config.split_keys && !features.dropout));
  static_assert(cluster == 1 || (forwards && !listed && !features.packed));
  static_assert(block_q % wg_rows == 0 && 1 <= warpgroups && warpgroups <= 3 && block_kv % 16 == 0);
  static_assert(ptx::wgmma_has_shape(score_keys) && ptx::wgmma_has_shape(width_v));
  static_assert(config.num_warps * 32 == threads);
};

}  // namespace flash_attention::forward_sm90
