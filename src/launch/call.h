#pragma once

// The arguments of a CPU kernel, like AttentionArgs for a GPU kernel. The code of every instruction set includes it:
// plain data, and no header with inline functions (see cpu/isa/).

#include <cstdint>

#include "flash_attention/dtype.h"
#include "launch/program_view.h"

namespace flash_attention::cpu {

/// [batch, seq, heads, dim] with unit last stride; strides in elements. Packed: batch_stride is 0.
struct TensorView {
  char* data = nullptr;
  std::int64_t batch_stride = 0;
  std::int64_t seq_stride = 0;
  std::int64_t head_stride = 0;
};

/// [batch, heads_q, seq_q, seq_kv] with unit last stride; a stride of 0 broadcasts. Null if there is none.
struct ScoreView {
  char* data = nullptr;
  Dtype dtype = Dtype::float32;  // of a bias; masks are bytes
  std::int64_t batch_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t q_stride = 0;
};

/// Scales of 8-bit q, k and v: of the tensor, of (batch, head), or of rows, in the order of the rows of k and v. Null:
/// none.
struct ScaleView {
  const float* data = nullptr;
  std::int64_t batch_stride = 0;
  std::int64_t seq_stride = 0;
  std::int64_t head_stride = 0;
};

/// Scales of groups of columns of 4-bit k and v, and of int4 zeros, which follow the rows; strides in scales.
struct GroupView {
  const char* scales = nullptr;
  const char* zeros = nullptr;
  std::int64_t batch_stride = 0;
  std::int64_t seq_stride = 0;
  std::int64_t head_stride = 0;
};

/// One call of attention. The same for every kernel.
struct Call {
  Dtype dtype = Dtype::float32;
  TensorView q, k, v, out;
  Dtype q_dtype = Dtype::float32;   // of q: dtype, or codes of 8 bits
  Dtype kv_dtype = Dtype::float32;  // of k and v: dtype, or float32 if they are copies
  TensorView k_source, v_source;    // the sources of the copies; null: there are no copies
  ScaleView q_scale, k_scale, v_scale;
  bool token_scales = false;  // each row has its own scale
  GroupView k_groups, v_groups;
  int kv_group = 0;  // columns of a group; 0: k and v are not of 4 bits
  TensorView dout, dq, dk, dv;
  float* lse = nullptr;         // [batch, heads_q, seq_q], packed [heads_q, total_q]; may be null in forward
  const float* dlse = nullptr;  // may be null

  // Statistics; null: not computed.
  float* max_logit = nullptr;        // [batch, heads_q]
  float* key_mass = nullptr;         // [batch, heads_q, seq_kv], packed [heads_q, total_kv]
  float* entropy = nullptr;          // layout of lse; backward reads it
  const float* dkey_mass = nullptr;  // backward
  const float* dentropy = nullptr;   // backward

  // tangent and second. Null inputs are 0, null results are not written.
  TensorView q_tangent, k_tangent, v_tangent, out_tangent;
  float* lse_tangent = nullptr;
  const float* sink_tangent = nullptr;

  const std::int32_t* cu_seqlens_q = nullptr;  // null: not packed
  const std::int32_t* cu_seqlens_kv = nullptr;
  const std::int32_t* seqused_q = nullptr;
  const std::int32_t* seqused_kv = nullptr;
  const std::int32_t* key_lengths = nullptr;
  const std::int32_t* left_padding = nullptr;
  const std::int32_t* sequence_windows = nullptr;  // [batch, 2], left and right; negative: no bound

  // null: no pages; otherwise the batch stride of k and v is from page to page
  const std::int32_t* page_table = nullptr;
  std::int64_t page_table_stride = 0, page_size = 0;

  ScoreView bias, mask, dbias, bias_tangent;
  const std::int32_t* hidden_rows = nullptr;  // null: none; `hidden_bounds` numbers for each key
  std::int64_t hidden_batch_stride = 0, hidden_head_stride = 0;
  int hidden_bounds = 0;
  ScoreView block_mask;  // over blocks of mask_block_q queries and mask_block_kv keys
  int mask_block_q = 1, mask_block_kv = 1;
  const std::uint8_t* bit_mask = nullptr;  // bits of keys, or with bit_mask_row_bytes bits of drafts
  const std::int32_t* bit_mask_offsets = nullptr;
  std::int64_t bit_mask_row_bytes = 0;
  bool has_bit_mask = false;
  const float* alibi_slopes = nullptr;
  std::int64_t alibi_batch_stride = 0;
  const float* sink = nullptr;
  float* dsink = nullptr;

  std::int64_t batch = 0, seq_q = 0, seq_kv = 0, total_q = 0, total_kv = 0;  // packed: seq_q and seq_kv are the longest
  int heads_q = 0, heads_kv = 0, group = 1;
  int head_dim = 0, head_dim_v = 0;
  bool latent = false;  // a key is its value, then head_dim - head_dim_v columns of k

  float scale = 1;
  float softcap = 0;
  std::int64_t window_left = -1, window_right = -1, chunk = 0;
  bool top_left = false;
  bool invariant = false;  // tiles of keys begin at multiples of their size

  bool dropout = false;
  std::uint32_t drop_threshold = 0;
  float keep_scale = 1;
  std::uint64_t seed = 0, offset = 0;

  const ProgramView* program = nullptr;  // may be null

  const std::int32_t* key_list = nullptr;    // if list_heads != 0: [batch, rows of lists, list_heads, list_entries]
  const std::int32_t* key_counts = nullptr;  // may be null
  std::int64_t list_entries = 0, list_block_q = 1, list_block_kv = 1;
  int list_heads = 0;        // 0: no lists; otherwise 1, heads_kv or heads_q
  bool list_set = false;     // an entry that is in a list twice counts once
  float* row_max = nullptr;  // as lse; may be null

  int num_splits = 1;
  int blocks_together = 1;                // blocks of rows that go over the keys together
  int heads_together = 1;                 // key heads that decode reads together
  bool packs_keys = false;                // a first step packs K and V for all blocks of rows
  std::int64_t cache_resident_bytes = 0;  // up to this size K and V of a sequence stay in the caches
  char* workspace = nullptr;
  std::int64_t workspace_offsets[10] = {};  // bytes; plan/families/cpu_regions.h has their names

  int key_columns() const { return latent ? head_dim - head_dim_v : head_dim; }  // of k
  bool has_score_program() const { return program != nullptr && program->score.instructions != nullptr; }
  bool has_mask_program() const { return program != nullptr && program->visible.instructions != nullptr; }
};

}  // namespace flash_attention::cpu
