#pragma once

// How forward/sm80 shares out wide values: what the planner reserves is what the kernel uses.

namespace flash_attention::abi {

/// Warps that have the same rows, and a part of O's columns each.
constexpr int forward_sm80_column_warps(int head_dim_v) { return head_dim_v > 256 ? 2 : 1; }

/// Columns of V in shared memory: whole panels of 64 for each of the two.
constexpr int forward_sm80_value_columns(int head_dim_v) {
  return head_dim_v > 256 ? (head_dim_v + 127) / 128 * 128 : (head_dim_v + 15) / 16 * 16;
}

}  // namespace flash_attention::abi
