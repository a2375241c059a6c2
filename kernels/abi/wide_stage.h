#pragma once

// Heads wider than 256: a stage of K and V, or of the operands of their gradients, is 16 KiB. Some stages have all
// columns of a few rows, which wgmma reads in chunks of 64.

namespace flash_attention::abi {

/// Rows of a stage that has all columns.
constexpr int wide_stage_rows(int head_dim) { return head_dim > 256 ? 16 : head_dim > 128 ? 32 : 64; }

/// Chunks of such a stage that TMA loads in one box: all, an even number, if no chunk is cut off. If a lane issued them
/// one after another, it would be slower than the products.
constexpr int wide_box_chunks(int head_dim) { return head_dim % 64 == 0 ? (head_dim + 127) / 128 * 2 : 1; }

}  // namespace flash_attention::abi
