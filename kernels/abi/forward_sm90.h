#pragma once

// How forward/sm90 fills its shared memory. The planner reserves what these functions return, and the kernel uses it.
// Plain constexpr arithmetic on a configuration, the same on host and device.

#include "abi/config.h"
#include "abi/wide_stage.h"

namespace flash_attention::abi {

struct ForwardSm90Layout {
  int q_stages;      // tiles of Q
  int o_chunks;      // columns of O that are stored at a time, in chunks of 64
  int shared_bytes;  // of a block
  // In the fixed order: of the segments so far, beside the memory of O; 0: they are in the workspace.
  int totals_bytes = 0;
};

constexpr int forward_sm90_max_shared_bytes = 232448;

/// Whether heads are so wide that two warpgroups share 64 rows, with half of O's columns each
/// (kernels/forward/sm90/wide_loop.cuh).
constexpr bool forward_sm90_is_wide(int head_dim, int head_dim_v) { return head_dim > 256 || head_dim_v > 256; }

/// K and V of wide heads are in stages of 16 KiB: 64 columns of 128 keys of K, or all columns of some keys of V.
constexpr int forward_sm90_wide_keys = 128;
constexpr int forward_sm90_wide_stage_bytes = 64 * 2 * forward_sm90_wide_keys;

/// Blocks of a cluster: two blocks with 64 queries each have the same keys, and each loads half of them for both.
constexpr int forward_sm90_cluster(int head_dim, int head_dim_v, int block_q) {
  return forward_sm90_is_wide(head_dim, head_dim_v) ? block_q / 64 : 1;
}

/// Keys of a stage of V.
constexpr int forward_sm90_value_rows(int head_dim, int head_dim_v, int block_kv) {
  return forward_sm90_is_wide(head_dim, head_dim_v) ? wide_stage_rows(head_dim_v) : block_kv;
}

/// Blocks of one warpgroup share an SM: two, or three if the head dimension leaves them enough registers.
constexpr int forward_sm90_blocks_per_sm(const ForwardConfig& config) {
  if (config.block_q > 64 || forward_sm90_is_wide(config.head_dim, config.head_dim_v)) return 1;
  return config.head_dim <= 64 && config.head_dim_v <= 64 && config.block_kv <= 64 ? 3 : 2;
}

/// Warpgroups that attend. With wide heads two share the rows.
constexpr int forward_sm90_warpgroups(const ForwardConfig& config) {
  return forward_sm90_is_wide(config.head_dim, config.head_dim_v) ? 2 : config.block_q / 64;
}

/// Whether three blocks share an SM and use all of its registers.
constexpr bool forward_sm90_is_crowded(const ForwardConfig& config) {
  return forward_sm90_blocks_per_sm(config) == 3 && config.head_dim > 32 && config.head_dim_v > 32;
}

/// Registers of a thread. The other warpgroups take the registers that the producer warpgroup gives up. A thread enters
/// with 168 registers if two warpgroups attend, with 128 if three attend or if two blocks share an SM, with 80 if three
/// blocks share it.
struct ForwardSm90Registers {
  int load = 40;
  int attend = 232;
};
constexpr ForwardSm90Registers forward_sm90_registers(const ForwardConfig& config) {
  const MaskWords words = config.loop.mask_words;
  const int warpgroups = forward_sm90_warpgroups(config), blocks = forward_sm90_blocks_per_sm(config);
  ForwardSm90Registers registers;
  // Warps that make words of a mask need more registers than one that loads; one that follows a list needs more than
  // one that counts.
  if (words == MaskWords::own) {
    registers.load = 88;
  } else if (config.features.precomputed_mask_bits) {
    registers.load = 56;
  } else if (forward_sm90_is_crowded(config)) {
    registers.load = 24;
  } else if (blocks == 3 || warpgroups == 3) {
    registers.load = 32;
  }
  if (blocks == 3) {
    registers.attend = 160 - registers.load;
  } else if (words == MaskWords::own) {
    registers.attend = 208;
  } else if (config.features.precomputed_mask_bits) {
    registers.attend = warpgroups == 1 ? 200 : 224;
  } else if (warpgroups != 2) {
    registers.attend = warpgroups == 1 ? 216 : 160;
  }
  return registers;
}

/// Tiles that a block remembers in order to repeat them. If tiles are claimed by a counter, the block also remembers
/// which ones they were, and claims no more than that. Lists of blocks and words of masks leave little room.
constexpr int forward_sm90_tiles_kept(const ForwardConfig& config) {
  return config.features.has_tile_map() && !forward_sm90_is_wide(config.head_dim, config.head_dim_v) ? 64 : 256;
}

/// If the keys of row tiles are split: groups of 64 rows of each head, as many as tiles of 128 rows have.
constexpr int forward_sm90_part_groups(int seq_q) { return (seq_q + 127) / 128 * 2; }

/// In the fixed order: floats that a thread keeps of the segments so far, which are its part of 64 rows of O, and
/// maximum and sum of two rows.
constexpr int forward_sm90_total_floats(int head_dim_v) { return (head_dim_v + 31) / 32 * 16 + 4; }

/// Bytes that the totals of the fixed order need beside the memory of O; and maximum and sum of each row.
constexpr int forward_sm90_totals_bytes(const ForwardConfig& config) {
  const int all = config.block_q * ((config.head_dim_v + 31) / 32 * 32) * 4;
  const int of_O = config.block_q * ((config.head_dim_v + 63) / 64) * 128;
  return (all > of_O ? all - of_O : 0) + config.block_q * 8;
}

/// With two tiles of Q and a whole tile of O nothing waits at the end of a tile. If that does not fit there is only one
/// tile of Q; if that does not fit either, half a tile of O, which is filled and stored twice.
constexpr ForwardSm90Layout forward_sm90_layout(const ForwardConfig& config) {
  const int chunk_bytes = 64 * 2;  // of a row
  const int chunks = (config.head_dim + 63) / 64, chunks_v = (config.head_dim_v + 63) / 64;
  if (forward_sm90_is_wide(config.head_dim, config.head_dim_v)) {
    const int tiles = 64 * (chunks + 4) * chunk_bytes;  // Q; two P, of which one also holds O
    return {1, 2, tiles + config.num_stages * forward_sm90_wide_stage_bytes + 2048};
  }
  const int bias_bytes = config.bias_stages * config.block_q * config.block_kv * 2;
  const int kv_bytes = config.num_stages * config.block_kv * (chunks + chunks_v) * chunk_bytes + bias_bytes;
  const int q_bytes = config.block_q * chunks * chunk_bytes;
  const int o_chunk_bytes = config.block_q * chunk_bytes;
  // An SM has 228 KiB, and reserves 1 KiB for each block.
  const int limit = 233472 / forward_sm90_blocks_per_sm(config) / 1024 * 1024 - 1024;
  const int mask_bytes = config.loop.mask_words == MaskWords::own ? config.block_q * config.block_kv / 8 : 0;
  const bool many_marks = config.dynamic_scheduler && config.loop.mask_words == MaskWords::none;
  const bool many_barriers = config.bias_stages > 0 && config.block_q > 128 && !config.features.has_tile_map();
  // barriers and marks, after the tiles
  const int tail_bytes = mask_bytes + (many_marks || many_barriers ? 2048 : 1024);
  const int spare = limit - tail_bytes - kv_bytes;
  if (has_fixed_order(config)) {
    const int totals_bytes = forward_sm90_totals_bytes(config);
    const int used = totals_bytes + chunks_v * o_chunk_bytes, stages = spare >= 2 * q_bytes + used ? 2 : 1;
    if (spare >= q_bytes + used)
      return {stages, chunks_v, (kv_bytes + stages * q_bytes + used + tail_bytes + 1023) / 1024 * 1024, totals_bytes};
  }
  const int q_stages = spare >= 2 * q_bytes + chunks_v * o_chunk_bytes ? 2 : 1;
  const int o_chunks = spare >= q_stages * q_bytes + chunks_v * o_chunk_bytes ? chunks_v : (chunks_v + 1) / 2;
  return {q_stages, o_chunks, kv_bytes + q_stages * q_bytes + o_chunks * o_chunk_bytes + tail_bytes};
}

}  // namespace flash_attention::abi
