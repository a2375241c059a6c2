#pragma once

// How forward/sm80 divides wide values among warps. The planner reserves what these functions return, and the kernel
// uses it.

namespace flash_attention::abi {

/// Warps that share the same rows; each has a part of O's columns.
constexpr int forward_sm80_column_warps(int head_dim_v) { return head_dim_v > 256 ? 2 : 1; }

/// Columns of V in shared memory: whole panels of 64 for each warp that shares rows.
constexpr int forward_sm80_value_columns(int head_dim_v) {
  return head_dim_v > 256 ? (head_dim_v + 127) / 128 * 128 : (head_dim_v + 15) / 16 * 16;
}

}  // namespace flash_attention::abi
