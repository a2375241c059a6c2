#pragma once

// How forward/sm100 fills its shared memory and its tensor memory: what the planner must reserve is what the kernel uses.
// Plain constexpr arithmetic on a configuration, the same on host and device.

#include "abi/config.h"

namespace flash_attention::abi {

constexpr int forward_sm100_rows = 128;      // queries of a Q tile: the M of a product
constexpr int forward_sm100_block_kv = 128;  // keys of a KV block
constexpr int forward_sm100_max_shared_bytes = 232448;

/// Warpgroups: a softmax one for each Q tile, one that rescales and stores O, and one whose warps load and multiply.
constexpr int forward_sm100_warps(int block_q) { return 4 * (block_q / forward_sm100_rows + 2); }

/// Columns of O in tensor memory: the N of its products.
constexpr int forward_sm100_width_v(int head_dim_v) { return (head_dim_v + 15) / 16 * 16; }

struct ForwardSm100Layout {
  int k_stages, v_stages;
  int tensor_columns;  // a power of two
  int shared_bytes;
};

/// config.num_stages is the stages of K; V has as many, or one less where they do not fit.
constexpr ForwardSm100Layout forward_sm100_layout(const ForwardConfig& config) {
  const int q_tiles = config.block_q / forward_sm100_rows, chunk_row_bytes = 128;
  const int chunks = (config.head_dim + 63) / 64, chunks_v = (config.head_dim_v + 63) / 64;
  const int k_bytes = chunks * config.block_kv * chunk_row_bytes, v_bytes = chunks_v * config.block_kv * chunk_row_bytes;
  const int mail_bytes = q_tiles * 2 * forward_sm100_rows * 4, barrier_bytes = 1024;
  const int fixed = config.block_q * chunks * chunk_row_bytes + mail_bytes + barrier_bytes;
  const int k_stages = config.num_stages;
  const bool fits = fixed + k_stages * (k_bytes + v_bytes) <= forward_sm100_max_shared_bytes;
  const int v_stages = fits ? k_stages : k_stages - 1;
  const int needed = q_tiles * (forward_sm100_block_kv + forward_sm100_width_v(config.head_dim_v));
  int columns = 32;
  while (columns < needed) columns *= 2;
  return {k_stages, v_stages, columns, fixed + k_stages * k_bytes + v_stages * v_bytes};
}

/// Registers of a thread by its role, for setmaxnreg: with two Q tiles a thread enters with 128.
struct ForwardSm100Registers {
  int softmax = 192;
  int output = 72;
  int load = 56;  // and multiply
};

}  // namespace flash_attention::abi
