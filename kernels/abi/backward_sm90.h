#pragma once

// How the kernels of backward/sm90 fill their shared memory. The planner reserves what these functions return, and the
// kernels use it. Plain constexpr arithmetic on a configuration, the same on host and device.

#include "abi/config.h"

namespace flash_attention::abi {

/// BackwardConfig::split_first: the queries of the first tile of keys are split into parts of this many queries.
constexpr int backward_sm90_part_rows = 1024;
constexpr int backward_sm90_first_parts(long long seq_q) {
  const long long parts = (seq_q + backward_sm90_part_rows - 1) / backward_sm90_part_rows;
  return parts > 2 ? static_cast<int>(parts) : 1;
}

constexpr int backward_sm90_max_shared_bytes = 232448;

/// BackwardConfig::statistics_by_product: bytes of the parts of each row in the workspace.
constexpr int backward_sm90_parts_row_bytes = 16;

struct BackwardSm90Layout {
  int chunk_bytes = 64 * 64 * 2;  // 64 rows of 64 columns
  int chunks, chunks_v, width, warpgroups, statistics_bytes;

  constexpr explicit BackwardSm90Layout(const BackwardConfig& config)
      : chunks((config.head_dim + 63) / 64),
        chunks_v((config.head_dim_v + 63) / 64),
        width((config.head_dim + 31) / 32 * 32),
        warpgroups(config.block_kv / 64),
        statistics_bytes(config.statistics_by_product ? 896 : 512) {}

  /// Row statistics, barriers, and the padding of the whole.
  constexpr int tail_bytes(int stages) const { return (stages * statistics_bytes + 1023) / 1024 * 1024 + 1024; }
  constexpr int tiles(int count) const { return count * (chunks + chunks_v) * chunk_bytes; }
};

/// backward/sm90: K and V; the ring of Q and dO (and of biases); dS for each owner; dQ before its store.
constexpr int backward_sm90_shared_bytes(const BackwardConfig& config) {
  const BackwardSm90Layout l(config);
  const bool separate_dq = config.dq_mode == DqMode::separate_kernel;
  const int dS = separate_dq ? l.chunk_bytes : l.warpgroups * l.warpgroups * l.chunk_bytes;
  const int dQ = separate_dq ? 0 : l.warpgroups * 64 * l.width * 4;
  const int biases = config.bias_boxes ? config.num_stages * l.warpgroups * l.chunk_bytes : 0;
  return l.tiles(l.warpgroups + config.num_stages) + dS + dQ + biases + l.tail_bytes(config.num_stages);
}

/// The number of K's first chunks that backward/sm90/wide/kernel.cuh keeps in registers: if there are many chunks, and
/// no option that touches every score needs the registers.
constexpr int backward_sm90_wide_register_chunks(const BackwardConfig& config) {
  const Features& f = config.features;
  const bool plain = !f.softcap && !f.bias && !f.alibi && !f.mask && !f.dropout && !f.score_program;
  return plain && BackwardSm90Layout(config).chunks > 2 ? 2 : 0;
}

/// backward/sm90/wide/kernel.cuh: K and V; the rings of Q (num_stages) and dO (two); P between the warpgroups.
constexpr int backward_sm90_wide_shared_bytes(const BackwardConfig& config) {
  const BackwardSm90Layout l(config);
  const int chunks = l.chunks * (1 + config.num_stages) - backward_sm90_wide_register_chunks(config) + l.chunks_v * 3;
  return (chunks + 2) * l.chunk_bytes + l.tail_bytes(config.num_stages);
}

/// backward/sm90/columns: two blocks have 64 rows each and go over the same steps. Each loads half of every step for
/// both.
constexpr int backward_sm90_columns_cluster = 2;

/// backward/sm90/columns: 64 rows of one tensor, for dP of two; the ring of stages of 16 KiB; P or dS of two steps.
constexpr int backward_sm90_columns_shared_bytes(const BackwardConfig& config, bool has_dP) {
  const BackwardSm90Layout l(config);
  return (l.chunks + (has_dP ? l.chunks_v : 1) + 2 + 2 * config.num_stages) * l.chunk_bytes + 2048;
}

/// backward/sm90/separate_dq/kernel.cuh: Q and dO of 128 queries; the ring of K and V.
constexpr int backward_sm90_dq_shared_bytes(const BackwardConfig& config) {
  const BackwardSm90Layout l(config);
  const int slot = (l.chunks > l.chunks_v ? l.chunks : l.chunks_v) * l.chunk_bytes;
  return l.tiles(2) + config.num_stages * slot + 1024;
}

}  // namespace flash_attention::abi
