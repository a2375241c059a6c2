#pragma once

// How forward/sm90_fp8 fills its shared memory, and where the workspace has V, transposed. Plain constexpr arithmetic,
// the same on host and device.

#include "abi/config.h"

namespace flash_attention::abi {

/// Keys of V^T that are adjacent in shared memory: the width of its swizzle, in bytes.
constexpr int forward_sm90_fp8_v_chunk(int block_kv) { return block_kv % 128 == 0 ? 128 : block_kv % 64 == 0 ? 64 : 32; }

/// The tile of a block of the launch that transposes V: 256 keys of 128 columns.
constexpr int forward_sm90_fp8_transposed_keys = 256, forward_sm90_fp8_transpose_bytes = 256 * 128;

/// The other way to transpose V is in jobs: a warp takes so many keys of a head, all columns.
constexpr int forward_sm90_fp8_job_keys = 64, forward_sm90_fp8_job_threads = 256;  // of a block of the first launch
constexpr long long forward_sm90_fp8_jobs_of_head(long long seq_kv, int block_kv) {
  const long long keys = (seq_kv + block_kv - 1) / block_kv * block_kv;
  return (keys + forward_sm90_fp8_job_keys - 1) / forward_sm90_fp8_job_keys;
}
/// With ForwardConfig::transposes_late: the heads of keys, counted through the batch, that the first tiles of `blocks`
/// thread blocks need. The first launch transposes them.
constexpr long long forward_sm90_fp8_first_heads(const ForwardConfig& config, long long seq_q, long long heads_kv,
                                                 int group, long long batch, long long blocks) {
  const long long heads = heads_kv * batch, row_tiles = (seq_q + config.block_q - 1) / config.block_q;
  const long long units = config.pair_tiles ? (row_tiles + 1) / 2 : row_tiles;
  const long long first = ((blocks + units - 1) / units + group - 1) / group;
  return first > heads ? heads : first;
}

/// After so many keys O is added to sums in fp32, in shared memory. Beside a wide O and such blocks of keys there is no
/// room for them: then no row may have more keys.
constexpr int forward_sm90_fp8_sum_keys = 2304;
constexpr bool forward_sm90_fp8_keeps_sums(const ForwardConfig& config) {
  return config.head_dim_v <= 128 || config.block_kv <= 64;
}

struct ForwardSm90Fp8Layout {
  int q_stages;      // tiles of Q
  int shared_bytes;  // of a block
};

constexpr ForwardSm90Fp8Layout forward_sm90_fp8_layout(const ForwardConfig& config) {
  const int row_bytes = (config.head_dim + 127) / 128 * 128, width_v = (config.head_dim_v + 31) / 32 * 32;
  const int kv_bytes = config.num_stages * config.block_kv * (row_bytes + width_v);
  const int q_bytes = config.block_q * row_bytes;
  const int sum_bytes = config.block_q * width_v * (forward_sm90_fp8_keeps_sums(config) ? 4 : 2);
  const int bias_bytes = config.bias_stages * config.block_q * config.block_kv * 2;
  constexpr int tail_bytes = 1024;  // barriers, after the tiles
  const int others = bias_bytes + kv_bytes + sum_bytes + tail_bytes;
  const int q_stages = others + 2 * q_bytes <= 232448 ? 2 : 1;
  return {q_stages, others + q_stages * q_bytes};
}

/// V^T is [batch, heads_kv, head_dim_v, places], packed [heads_kv, head_dim_v, places]. Each sequence has whole blocks:
/// zeros follow its last key.
constexpr long long transposed_places(bool packed, long long batch, long long seq_kv, long long total_kv, int block_kv) {
  return (packed ? total_kv / block_kv + batch : (seq_kv + block_kv - 1) / block_kv) * block_kv;
}
/// Whether V^T is packed. Keys in pages have no place in a packed tensor.
constexpr bool forward_sm90_fp8_packed_values(const Features& features) { return features.packed && !features.paged; }
/// The place where a packed sequence begins whose first key is `start`.
constexpr long long transposed_start(long long start, int batch_idx, int block_kv) {
  return (start / block_kv + batch_idx) * block_kv;
}

}  // namespace flash_attention::abi
