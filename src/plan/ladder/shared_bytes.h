#pragma once

#include <algorithm>

#include "plan/ladder/ladder.h"

// Shared memory of the rungs, as their SharedStorage has it: bytes of a block that computes with rows of head_dim elements.

namespace flash_attention::plan {

constexpr int float_bytes = 4, half_bytes = 2;

inline int row_tile_bytes(const Rung& rung, int dim) {
  const int Q = rung.block_q * dim, K = rung.block_kv * (dim + 4), V = rung.block_kv * dim,
            P = rung.block_q * rung.block_kv;
  return float_bytes * (Q + K + V + P);
}

/// Columns of a tile: whole steps of a product, or whole panels of tile::SwizzledTile.
inline int wide(int head_dim) { return (head_dim + 15) / 16 * 16; }
inline int in_panels(int head_dim) { return (head_dim + 63) / 64 * 64; }

/// Two tensors of a block and of a tile, and two weights of each pair, in fp32.
inline int backward_tile_bytes(const Rung& rung, int dim) {
  return 2 * float_bytes * (rung.block_q * dim + rung.block_kv * (dim + 4) + rung.block_q * rung.block_kv);
}

/// The two tensors of a block and of each stage in tile::SwizzledTile, with two statistics of each query; each stage is
/// rounded up to the tiles' alignment.
inline int backward_mma_bytes(const Rung& rung, int dim) {
  return 2 * half_bytes * (rung.block_q + rung.num_stages * rung.block_kv) * in_panels(dim) + 1024 * rung.num_stages;
}

/// One kernel on tiles of each kind.
inline int backward_mixed_bytes(const Rung& rung, int dim) {
  return std::max(backward_tile_bytes(rung, dim), backward_mma_bytes(rung, dim));
}

/// 16-bit Q, K, V and P; S and the product P V in fp32.
inline int wmma_bytes(const Rung& rung, int head_dim) {
  const int operands = (rung.block_q + 2 * rung.block_kv) * wide(head_dim) + rung.block_q * (rung.block_kv + 8);
  return half_bytes * operands + float_bytes * rung.block_q * (rung.block_kv + 4 + wide(head_dim) + 4);
}

/// The same without S, and with three statistics of a row.
inline int fragment_bytes(const Rung& rung, int head_dim) {
  return wmma_bytes(rung, head_dim) - float_bytes * rung.block_q * (rung.block_kv + 4) + 3 * float_bytes * rung.block_q;
}

/// Q and stages of K and V, 16 bits.
inline int plain_bytes(const Rung& rung, int head_dim) {
  return half_bytes * (rung.block_q + 2 * rung.num_stages * rung.block_kv) * wide(head_dim);
}

/// The same in tile::SwizzledTile.
inline int swizzled_bytes(const Rung& rung, int head_dim) {
  return half_bytes * (rung.block_q + 2 * rung.num_stages * rung.block_kv) * in_panels(head_dim);
}

/// The same with barriers after the tiles, rounded up to the tiles' alignment.
inline int tma_bytes(const Rung& rung, int head_dim) { return swizzled_bytes(rung, head_dim) + 1024; }

/// The same with a second stage of Q and a buffer for O.
inline int persistent_bytes(const Rung& rung, int head_dim) {
  return tma_bytes(rung, head_dim) + 2 * half_bytes * rung.block_q * in_panels(head_dim);
}

/// Q, O and stages of K and V^T in 8 bits, O in 16; a row of Q and K, and of V^T, is 128 bytes.
inline int narrow_bytes(const Rung& rung, int head_dim) {
  const int columns = (head_dim + 31) / 32 * 32;
  const int stage = 128 * (rung.block_kv + columns);
  return rung.block_q * (128 + half_bytes * in_panels(columns)) + rung.num_stages * stage + 1024;
}

}  // namespace flash_attention::plan
