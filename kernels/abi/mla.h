#pragma once

// How decode/mla_sm90 fills its shared memory. The planner reserves what mla_shared_bytes returns, and the kernel uses
// it.

#include "abi/config.h"

namespace flash_attention::abi {

constexpr int mla_columns = 576;  // of a stage: the values, then the key's own columns, over which P is written
constexpr int mla_head_dim_v = 512;
constexpr int mla_block_q = 64;   // rows of a tile: the M of wgmma
constexpr int mla_block_kv = 64;  // keys of a KV block
constexpr int mla_stages = 2;
constexpr int mla_panels_of_part = 2;  // a panel is 64 columns; parts of a stage are loaded apart
constexpr int mla_threads = 3 * 128;  // two warpgroups that attend, one that loads

/// Q and the stages, in 16-bit rows; barriers and statistics.
constexpr int mla_shared_bytes = (mla_block_q + mla_stages * mla_block_kv) * mla_columns * 2 + 4096;

/// backward/mla_sm90: Q, dO, a tile of keys, P and dS; statistics and barriers.
constexpr int mla_backward_shared_bytes =
    (mla_block_q * (mla_columns + mla_head_dim_v) + mla_block_kv * mla_columns + 2 * mla_block_q * mla_block_kv) * 2 + 2048;

}  // namespace flash_attention::abi
