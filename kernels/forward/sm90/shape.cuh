#pragma once

// The sizes of forward/sm90 that follow from its configuration.

#include "abi/args.h"
#include "abi/config.h"
#include "abi/forward_sm90.h"
#include "ptx/convert.cuh"
#include "ptx/wgmma.cuh"
#include "tile/score.cuh"

namespace flash_attention::forward_sm90 {

using namespace abi;

/// Indices into AttentionArgs::maps; each is [head_dim, rows, heads, batch] with boxes of 64 columns (128 bytes). With
/// pages K and V are [head_dim, page_size, heads, pages]. V of wide heads is [64, rows, head_dim / 64, heads, batch] where
/// it can be. The bias is [seq_kv, seq_q, heads or 1, batch or 1] with boxes of 64 keys, or all of a block, and 64 queries.
enum Map : int { map_Q = 0, map_K = 1, map_V = 2, map_O = 3, map_bias = 4 };

constexpr int wg_threads = 128;
constexpr int wg_rows = 64;    // query rows of a warpgroup: the M of its products
constexpr int chunk_dim = 64;  // columns of a tile that are together: 128 bytes, the width of the swizzle

/// A unit of the scheduler, as a block remembers it: next to words of masks there is little room.
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

  // Hidden rows or a block mask choose the blocks of keys: the producer warp says with each K which one it is.
  static constexpr bool listed = tile::TileMap<features>::present;
  static constexpr bool mask_words = forward_sm90_has_mask_words(config);
  static constexpr bool makes_words = forward_sm90_makes_words(config);  // else they are in memory
  // A tested block may keep the maximum. Each copy of a program of scores would take its time to compile.
  static constexpr bool keeps_tested = mask_words && !features.score_program;
  static constexpr int tiles_kept = forward_sm90_tiles_kept(config);
  // A warpgroup skips listed blocks that only the other sees. Beside options it has no registers to do so; with bytes a
  // random mask lost 6 to 22 % when the loop came to skip and to claim late (docs/lab/masks.md).
  static constexpr bool skips_listed = !features.modifies_scores() && !features.dropout && !features.mask;
  using Unit = UnitNumber<mask_words>;  // of the scheduler
  // A block claims a tile before the last block of the one before: what it holds, others wait for at the end. Small tiles
  // of masks have few blocks: the next is claimed at once.
  static constexpr bool claims_late = config.dynamic_scheduler && !(listed && config.block_q == 64);
  // A warp next to the one that loads finds the tiles and their blocks: claim, map and list of a tile take one thread
  // longer than the products of a few blocks take. Where the other warps make words of masks they have no time for it.
  static constexpr bool finds_ahead = listed && !makes_words && !forward_sm90_is_wide(config.head_dim, config.head_dim_v);
  static constexpr int block_q = config.block_q, block_kv = config.block_kv, stages = config.num_stages;

  // Wide heads: two warpgroups have the same rows, and each has half of a block's keys, and half of O's columns.
  static constexpr bool wide = forward_sm90_is_wide(config.head_dim, config.head_dim_v);
  static constexpr int cluster = forward_sm90_cluster(config.head_dim, config.head_dim_v, block_q);  // blocks
  static constexpr int row_groups = block_q / cluster / wg_rows;                                     // of 64 query rows
  static constexpr int warpgroups = wide ? 2 : row_groups;           // that attend; one more loads
  static constexpr int score_keys = wide ? block_kv / 2 : block_kv;  // of a block, whose scores a warpgroup has
  static constexpr int threads = (warpgroups + 1) * wg_threads;

  // Ping-pong. With a wide O a block's products take so long that the warpgroups need no order; under a window a tile ends
  // before they are worth it.
  static constexpr bool pingpong =
      warpgroups > 1 && !wide && config.head_dim_v <= 128 && !(features.window_left && config.head_dim_v > 64);

  // Columns past the head dimension read as zero and are not stored, so tiles round up.
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

  // Biases that come by TMA, tiles of 64 queries in chunks of 64 keys like those of Q, or of 32 with half the swizzle.
  static constexpr int bias_stages = config.bias_stages;
  static constexpr int bias_keys = block_kv < chunk_dim ? block_kv : chunk_dim;
  static constexpr int bias_bytes = wg_rows * block_kv * 2;  // of one warpgroup

  // setmaxnreg: what the producer warpgroup gives up, the others take. A thread enters with 168 registers where two
  // warpgroups attend, with 128 where three do or where two blocks share an SM, with 80 where three blocks do.
  static constexpr int blocks_per_sm = forward_sm90_blocks_per_sm(config);
  static constexpr bool low_registers = blocks_per_sm == 3 && config.head_dim > 32 && config.head_dim_v > 32;
  // Warps that make words of a mask need more than one that loads, one that follows a list more than one that counts.
  static constexpr int load_registers = makes_words                             ? 88
                                        : features.made_words                   ? 56
                                        : low_registers                         ? 24
                                        : blocks_per_sm == 3 || warpgroups == 3 ? 32
                                                                                : 40;
  static constexpr int attend_registers = blocks_per_sm == 3    ? 160 - load_registers
                                          : makes_words         ? 208
                                          : features.made_words ? (warpgroups == 1 ? 200 : 224)
                                          : warpgroups == 1     ? 216
                                          : warpgroups == 2     ? 232
                                                                : 160;

  // Q stays in registers where all of it finds room in addition to S, P and O: read from shared memory for every block it
  // would be a quarter of what the products read, and they nearly use up what shared memory gives.
  static constexpr int free_registers = attend_registers - (block_kv * 3 / 4 + width_v / 2 + 4 * steps_qk);
  static constexpr bool by_words = features.made_words && !features.modifies_scores() && !features.dropout;
  static constexpr bool holds_queries =
      !wide && (by_words ? free_registers >= 32 : !features.touches_scores() && free_registers >= 40);

  // A branch that differs between lanes takes all that follows out of the uniform registers, and wgmma wants its
  // descriptors there. A vote keeps the lanes together; it needs registers that these configurations do not have: they
  // shuffle instead.
  static constexpr bool uniform_by_vote =
      !low_registers &&
      (!features.touches_scores() || (config.head_dim <= 128 && config.head_dim_v <= 128) ||
       !((features.bias && config.bias_stages == 0) || features.mask || features.score_program || (listed && !by_words)));

  // Keys before the first visible one are hidden, by a window or as padding.
  static constexpr bool left_edge = features.window_left || features.left_padding;

  // Blocks that begin together read the same keys if all go from the first key to the last, and L2 is asked once for
  // several. With ALiBi, and a program may be like it, the nearest keys weigh most: they have to come first, to give the
  // reference. So they do with a left edge, which then is tested after the interior, on one side only.
  static constexpr bool forwards = !features.alibi && !left_edge && !features.score_program;

  // ALiBi seen both ways: from the diagonal to the first key, then from there to the last. All but the blocks at the
  // diagonal are on one side of it.
  static constexpr bool from_diagonal = features.alibi && !features.window_right && !left_edge && !listed && !wide &&
                                        !features.score_program && !is_narrow(key_type(features));

  // Rows of V that belong to no visible key may hold anything. TMA zeroes those past the tensor; others the kernel must.
  static constexpr bool hidden_rows = features.packed || features.seqused_kv || features.key_lengths || features.paged;

  // The row group and the first chunk of O's columns of a warpgroup.
  __device__ __forceinline__ static constexpr int row_group(int warpgroup) { return wide ? 0 : warpgroup; }
  __device__ __forceinline__ static constexpr int first_chunk(int warpgroup) { return wide ? warpgroup * chunks_v : 0; }

  static_assert(config.head_dim % 8 == 0 && config.head_dim <= 576 && config.head_dim_v % 8 == 0 &&
                config.head_dim_v <= 512);
  static_assert(!wide || (row_groups == 1 && cluster <= 2 && block_kv == forward_sm90_wide_keys));
  static_assert(!config.split_keys || (forwards && !listed && !wide && !features.touches_scores() && !features.sink &&
                                       !features.packed && !features.seqused_q && !config.pair_tiles));
  static_assert(cluster == 1 || (forwards && !listed && !features.packed && !features.paged));
  static_assert(block_q % wg_rows == 0 && 1 <= warpgroups && warpgroups <= 3 && block_kv % 16 == 0);
  static_assert(ptx::wgmma_has_shape(score_keys) && ptx::wgmma_has_shape(width_v));
  static_assert(config.num_warps * 32 == threads);
};

}  // namespace flash_attention::forward_sm90
