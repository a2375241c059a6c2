#pragma once

#include "abi/program.h"
#include "abi/workspace.h"

// The one parameter of every attention kernel. Plain data: no includes, the same layout on host and device.

namespace flash_attention::abi {

/// An encoded TMA descriptor (cuTensorMapEncodeTiled), or the emulator's own.
struct alignas(64) TensorMap {
  unsigned long long words[16];
};

/// [batch, seq, heads, dim] with unit last stride; strides in elements. Packed: [total, heads, dim].
struct TensorView {
  void* data;
  long long batch_stride;
  long long seq_stride;
  long long head_stride;
};

/// [batch, heads_q, seq_q, seq_kv] with unit last stride; a stride of 0 broadcasts.
struct ScoreView {
  const void* data;
  long long batch_stride;
  long long head_stride;
  long long q_stride;
};

/// Scales of 8-bit Q, K and V. A stride of 0 shares one scale. Scales of rows have the pages, places and heads of their
/// rows.
struct ScaleView {
  const float* data;
  long long batch_stride;
  long long seq_stride;
  long long head_stride;
};

/// Scales of groups of columns of 4-bit K and V, and of int4 their zeros: they follow the rows; strides in scales.
struct GroupView {
  void* scales;
  void* zeros;
  long long batch_stride;
  long long seq_stride;
  long long head_stride;
};

struct AttentionArgs {
  TensorMap maps[8];  // TMA kernels only; abi/tensor_maps.h names them

  TensorView Q, K, V, O;
  TensorView dO, dQ, dK, dV;  // backward
  float* lse;                 // natural log; [batch, heads_q, seq_q], packed [heads_q, total_q]; may be null in forward
  const float* dlse;          // layout of lse; may be null

  const int* cu_seqlens_q;   // [batch + 1] or null
  const int* cu_seqlens_kv;  // [batch + 1] or null
  const int* seqused_q;      // [batch] or null
  const int* seqused_kv;     // [batch] or null
  const int* key_lengths;    // [batch] or null
  const int* left_padding;   // [batch] or null

  const int* page_table;  // [batch, page_table_stride] or null; K and V: the batch stride leads from page to page
  long long page_table_stride;
  int page_size;
  int num_pages;

  ScoreView bias;
  ScoreView mask;             // one byte an element, nonzero = visible
  const float* alibi_slopes;  // [batch?, heads_q] or null
  long long alibi_batch_stride;
  const float* sink;  // [heads_q] or null
  ScaleView K_scale, V_scale;

  void* dbias;                   // dense [batch|1, heads_q|1, seq_q|1, seq_kv] or null
  long long dbias_batch_stride;  // 0 if bias broadcasts
  long long dbias_head_stride;
  long long dbias_q_stride;
  float* dsink;  // [heads_q] or null

  void* workspace;
  long long workspace_offsets[max_regions];  // bytes; abi/workspace.h has their names

  int batch;
  int seq_q;  // the longest sequence, if packed
  int seq_kv;
  int heads_q;
  int heads_kv;
  int group;    // heads_q / heads_kv
  int total_q;  // batch * seq_q, or the packed total
  int total_kv;
  int num_splits;

  int window_left;  // meaningful if Features says so
  int window_right;
  float scale;
  float softcap;

  // Dropout: keep where the Philox word is >= drop_threshold; docs/numerics.md.
  unsigned long long seed;
  unsigned long long offset;
  unsigned drop_threshold;
  float keep_scale;  // 1 / (1 - p)

  const int*
      hidden_rows;  // [batch?, heads_kv?, seq_kv, bounds], packed [heads_kv?, total_kv, bounds]; a stride of 0 broadcasts
  long long hidden_batch_stride;
  long long hidden_head_stride;
  ScoreView block_mask;  // [batch, heads_q, blocks of queries, blocks of keys], not 0 = visible
  int mask_block_q;
  int mask_block_kv;
  int map_heads;  // heads and batch entries that have a separate map of tiles: abi/tile_map.h
  int map_batches;

  ProgramArgs program;

  unsigned* repairs;  // forward/sm90 adds the number of tiles that it repeats; may be null

  ScaleView Q_scale;  // one for each sequence and key head, or one for all

  int chunk;  // positions that see each other; meaningful if Features says so

  // Lists of keys; meaningful if Features says so.
  const int* key_list;    // [batch, rows of lists, list_heads, list_entries], packed [total_q, list_heads, list_entries]
  const int* key_counts;  // the same without the last axis; may be null
  int list_entries;
  int list_heads;    // 1, heads_kv or heads_q
  int list_block_q;  // queries that share a list
  int list_block_kv;
  float* row_max;  // layout of lse; may be null
  float* max_logit;        // [batch, heads_q]
  float* key_mass;         // [batch, heads_q, seq_kv], packed [heads_q, total_kv]
  float* entropy;          // layout of lse
  const float* dkey_mass;  // backward: layout of key_mass
  const float* dentropy;   // backward: layout of lse
  // A bit mask; meaningful if Features says so.
  const unsigned char* bit_mask;
  const int* bit_offsets;       // [batch + 1], in bytes
  int bit_row_bytes;            // of drafts: bytes from a query to the next
  const int* sequence_windows;  // [batch, 2], left and right; negative: no bound

  // Forward mode and second derivatives: each tangent has the layout of its tensor. Null inputs are 0, null results are
  // not written.
  void *Q_tangent, *K_tangent, *V_tangent, *O_tangent;
  const void* bias_tangent;
  const float* sink_tangent;
  float* lse_tangent;
  // If heads are stacked (Features::stacked_heads): seq_q and total_q count rows, heads_q is heads_kv, group is 1, and this
  // is the number of query heads that share keys.
  int stacked_group;

  GroupView K_groups, V_groups;

  int early_heads;  // BackwardConfig::early_dq: so many heads, counted over the batch, are converted early: the first ones
};

static_assert(sizeof(TensorMap) == 128 && sizeof(TensorView) == 32 && sizeof(ScoreView) == 32);
static_assert(sizeof(AttentionArgs) <= 4096, "the parameter space of a kernel");

}  // namespace flash_attention::abi
