#pragma once

// Heads wider than 256: a stage of K and V, or of their gradients' operands, is 16 KiB. Some stages have all columns of a
// few rows, which wgmma takes in chunks of 64.

namespace flash_attention::abi {

/// Rows of such a stage.
constexpr int wide_stage_rows(int head_dim) { return head_dim > 256 ? 16 : head_dim > 128 ? 32 : 64; }

/// Chunks of it that TMA brings in one box: all if none is cut off, an even number. A lane that asks for them one after
/// another is slower than the products.
constexpr int wide_box_chunks(int head_dim) { return head_dim % 64 == 0 ? (head_dim + 127) / 128 * 2 : 1; }

}  // namespace flash_attention::abi
