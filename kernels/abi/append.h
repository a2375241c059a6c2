#pragma once

// Configuration and parameter of decode/append. Plain data, the same on host and device.

#include "abi/args.h"
#include "abi/config.h"

namespace flash_attention::abi {

struct AppendConfig {
  Type dtype = Type::float32;         // of q and of the new k and v
  Type cache_dtype = Type::float32;   // of the caches
  Type rotary_dtype = Type::float32;  // of cos and sin
  int vector = 1;                     // elements that move together: 8, 4, 2 or 1
  int lanes = 32;                     // lanes that share a row: a power of two
  bool rotary = false;
  bool interleaved = false;
  bool paged = false;
  bool scales = false;        // of an 8-bit cache
  bool token_scales = false;  // which are made here
};

struct AppendArgs {
  TensorView Q, Q_out, K, V;  // packed and placed rows have a batch stride of 0
  TensorView K_cache, V_cache;
  ScaleView K_scale, V_scale;
  const void* cos;
  const void* sin;
  long long rotary_stride;

  const int* lengths;         // [batch] or null
  const int* rotary_offsets;  // [batch] or null
  const int* cu_seqlens_new;  // [batch + 1] or null
  const int* cu_seqlens_q;    // [batch + 1] or null
  const int* sequences;       // [total_new] or null
  const int* positions;       // [total_new] or null
  const int* page_table;      // [batch, page_table_stride] or null
  long long page_table_stride;

  long long rows_q;  // tokens * heads: what the grid loops over, queries first, then keys, then values
  long long rows_keys;
  long long rows_values;
  int page_size;
  int num_pages;
  int capacity;
  int batch;
  int seq_q;
  int seq_new;
  int heads_q;
  int heads_kv;
  int head_dim;
  int head_dim_v;
  int rotary_dim;
  int rotary_positions;
  int one_query;  // all queries of a sequence have the angle of the first
};

/// Threads of a block.
constexpr int append_threads = 128;

constexpr long long append_blocks(const AppendConfig& config, const AppendArgs& args) {
  const long long rows_of_warp = 32 / config.lanes, round = rows_of_warp - 1;
  const long long warps = (args.rows_q + round) / rows_of_warp + (args.rows_keys + round) / rows_of_warp +
                          (args.rows_values + round) / rows_of_warp;
  return (warps * 32 + append_threads - 1) / append_threads;
}

}  // namespace flash_attention::abi
