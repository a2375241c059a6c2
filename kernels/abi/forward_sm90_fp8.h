#pragma once

// How forward/sm90_fp8 fills its shared memory, and where the workspace has V, transposed. Plain constexpr arithmetic,
// the same on host and device.

#include "abi/config.h"

namespace flash_attention::abi {

/// Keys of V^T that are adjacent in shared memory: the width of its swizzle, in bytes.
constexpr int forward_sm90_fp8_v_chunk(int block_kv) { return block_kv % 128 == 0 ? 128 : block_kv % 64 == 0 ? 64 : 32; }

/// The tile of a block of the launch that transposes V: 256 keys of 128 columns.
constexpr int forward_sm90_fp8_transposed_keys = 256, forward_sm90_fp8_transpose_bytes = 256 * 128;

struct ForwardSm90Fp8Layout {
  int q_stages;      // tiles of Q
  int shared_bytes;  // of a block
};

constexpr ForwardSm90Fp8Layout forward_sm90_fp8_layout(const ForwardConfig& config) {
  const int row_bytes = (config.head_dim + 127) / 128 * 128, width_v = (config.head_dim_v + 31) / 32 * 32;
  const int kv_bytes = config.num_stages * config.block_kv * (row_bytes + width_v);
  const int q_bytes = config.block_q * row_bytes;
  const int sum_bytes = config.block_q * width_v * 4;
  constexpr int tail_bytes = 1024;  // barriers, after the tiles
  const int q_stages = kv_bytes + 2 * q_bytes + sum_bytes + tail_bytes <= 232448 ? 2 : 1;
  return {q_stages, kv_bytes + q_stages * q_bytes + sum_bytes + tail_bytes};
}

/// V^T is [batch, heads_kv, head_dim_v, places], packed [heads_kv, head_dim_v, places]. Each sequence has whole blocks:
/// zeros follow its last key.
constexpr long long transposed_places(bool packed, long long batch, long long seq_kv, long long total_kv, int block_kv) {
  return (packed ? total_kv / block_kv + batch : (seq_kv + block_kv - 1) / block_kv) * block_kv;
}
/// The place where a packed sequence begins whose first key is `start`.
constexpr long long transposed_start(long long start, int batch_idx, int block_kv) {
  return (start / block_kv + batch_idx) * block_kv;
}

}  // namespace flash_attention::abi
