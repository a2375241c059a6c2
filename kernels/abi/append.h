#pragma once

// Configuration and parameters of decode/append. Plain data, the same on host and device.

#include "abi/args.h"
#include "abi/config.h"

namespace flash_attention::abi {

struct AppendConfig {
  Type dtype = Type::float32;         // of q and of the new k and v
  Type cache_dtype = Type::float32;   // of the caches
  Type rotary_dtype = Type::float32;  // of cos and sin
  Type norm_dtype = Type::float32;    // of the norms' weights
  int head_dim = 0;
  int head_dim_v = 0;
  int rotary_dim = 0;  // 0: nothing is rotated
  int vector = 1;      // elements that move together: 8, 4, 2 or 1
  int lanes = 32;      // lanes that share a row: a power of two
  bool interleaved = false;
  bool q_norm = false;  // rows of q are divided by their root mean square
  bool k_norm = false;
  bool plus_one = false;  // a norm's factor is 1 + weight
  bool angles = false;    // angle_positions has the angle of each token
  bool sections = false;  // pairs are divided among the rows of angle_positions
  bool sections_interleaved = false;
  bool in_rows = false;  // k goes to its own row of K_cache, there is no v, and rows of no sequence become 0
  bool paged = false;
  bool scales = false;        // of an 8-bit cache
  bool token_scales = false;  // for each row, computed here
  int group = 0;              // of a 4-bit cache: columns that share a scale, which is computed here
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

  const int* angle_positions;  // [sections, tokens] or null
  const void* q_weight;        // weights of the norms: [head_dim] or null
  const void* k_weight;

  long long tokens_q;  // the grid loops over these: queries first, then keys, then values
  long long tokens_new;
  int page_size;
  int num_pages;
  int capacity;
  int batch;
  int seq_q;
  int seq_new;
  int heads_q;
  int heads_kv;
  int rotary_positions;
  int one_query;      // all queries of a sequence have the angle of its first query
  int heads_of_task;  // heads of a token that a warp takes
  int angle_sections;
  int sections[4];  // pairs of each section
  float norm_eps;
  GroupView K_groups, V_groups;
};

// decode/append_gradient: gradients of rows that have been normalised and rotated (AppendConfig::in_rows).
struct AppendGradientArgs {
  AppendArgs rows;    // those of the call; Q and K are read only if they have norms
  TensorView dQ_out;  // the given gradients
  TensorView dK_out;
  TensorView dQ;
  TensorView dK;
  float* q_weight_sums;  // [blocks, head_dim], the sums of each block; null: no gradient of a weight is wanted
  float* k_weight_sums;
  float* dq_weight;  // [head_dim]
  float* dk_weight;
  int blocks;
};

/// Threads of a block.
constexpr int append_threads = 128;
constexpr int append_weights_threads = 512;
constexpr int most_append_gradient_blocks = 1056;  // as many as GPUs of today run at the same time

/// The rows that are in flight, as float, where their groups are quantised.
constexpr int append_shared_bytes(const AppendConfig& config) {
  const int dim = config.head_dim > config.head_dim_v ? config.head_dim : config.head_dim_v;
  return config.group == 0 ? 0 : append_threads / config.lanes * dim * 4;
}

/// Warps that share a token's heads.
constexpr int append_tasks(int heads, int heads_of_task) { return (heads + heads_of_task - 1) / heads_of_task; }

constexpr long long append_blocks(const AppendConfig& config, const AppendArgs& args) {
  const long long new_rows = append_tasks(args.heads_kv, args.heads_of_task) * args.tokens_new;
  const long long warps =
      append_tasks(args.heads_q, args.heads_of_task) * args.tokens_q + (config.in_rows ? 1 : 2) * new_rows;
  return (warps * 32 + append_threads - 1) / append_threads;
}

}  // namespace flash_attention::abi
