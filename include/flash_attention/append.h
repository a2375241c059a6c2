#pragma once

#include <cstdint>
#include <optional>

#include "flash_attention/attention.h"
#include "flash_attention/export.h"
#include "flash_attention/problem.h"

namespace flash_attention {

/// New rows for a cache of keys and values, and the rotary embedding of queries and keys: sizes, strides and options of one
/// call of append(). docs/numerics.md has the formulas.
struct AppendProblem {
  std::int64_t batch = 1;
  std::int64_t seq_new = 0;  ///< new rows of each sequence; 0: only queries are rotated. Not used where they are packed
  std::int64_t seq_q = 0;    ///< queries of each sequence; 0: none are rotated. Not used where they are packed
  std::int64_t heads_q = 1;
  std::int64_t heads_kv = 1;
  std::int64_t head_dim = 0;
  std::int64_t head_dim_v = 0;          ///< 0 = head_dim
  Dtype dtype = Dtype::float32;         ///< of q, k and v
  std::optional<Dtype> cache_dtype{};   ///< dtype if not given; 8-bit types are quantised to
  Dtype rotary_dtype = Dtype::float32;  ///< of cos and sin

  bool packed_new = false;  ///< new rows are end to end: cu_seqlens_new
  bool packed_q = false;    ///< queries are end to end: cu_seqlens_q
  bool placed = false;  ///< every new row says where it belongs: sequences and positions; so do queries, as many as rows
  std::int64_t total_new = 0;  ///< packed or placed: new rows of all sequences
  std::int64_t total_q = 0;    ///< packed or placed: queries of all sequences

  Strides q_strides{}, q_out_strides{}, k_strides{}, v_strides{};  ///< packed or placed: the batch stride is ignored
  Strides k_cache_strides{}, v_cache_strides{};                    ///< pages: the batch stride leads from page to page

  std::int64_t capacity = 0;           ///< rows that the cache has for a sequence; pages: 0 = page_table_stride of them
  std::int64_t page_size = 0;          ///< 0 = no pages
  std::int64_t num_pages = 0;          ///< pages that the caches hold
  std::int64_t page_table_stride = 0;  ///< entries from a sequence to the next; 0 = as many as capacity needs

  std::int64_t rotary_dim = 0;        ///< dimensions that are rotated, the first ones; 0 = none; even
  std::int64_t rotary_positions = 0;  ///< rows of cos and sin
  std::int64_t rotary_stride = 0;     ///< elements from a row of cos and sin to the next; 0 = rotary_dim / 2
  bool rotary_interleaved = false;    ///< pairs are neighbours, instead of half of rotary_dim apart
  bool rotary_offsets = false;        ///< the first angle of each sequence is rotary_offsets[b], not lengths[b]
  bool rotary_one_query = false;      ///< all queries of a sequence have the angle of the first

  ScaleKind scales = ScaleKind::none;  ///< of an 8-bit cache; those of rows are written
  Strides k_scale_strides{}, v_scale_strides{};

  friend bool operator==(const AppendProblem&, const AppendProblem&) = default;
};

/// Pointers to memory of Options::device.
struct AppendBuffers {
  const void* q = nullptr;    ///< [batch, seq_q, heads_q, head_dim]; packed or placed: [total_q, heads_q, head_dim]
  void* q_out = nullptr;      ///< the shape of q; may be q itself
  const void* k = nullptr;    ///< [batch, seq_new, heads_kv, head_dim]; packed or placed: [total_new, heads_kv, head_dim]
  const void* v = nullptr;    ///< the same with head_dim_v
  void* k_cache = nullptr;    ///< [batch, capacity, heads_kv, head_dim]; pages: [num_pages, page_size, heads_kv, head_dim]
  void* v_cache = nullptr;    ///< the same with head_dim_v
  const void* cos = nullptr;  ///< [rotary_positions, rotary_dim / 2]
  const void* sin = nullptr;

  const std::int32_t* lengths = nullptr;         ///< [batch]; rows that each sequence has. Not placed; null = none has any
  const std::int32_t* rotary_offsets = nullptr;  ///< AppendProblem::rotary_offsets; [batch]
  const std::int32_t* cu_seqlens_new = nullptr;  ///< AppendProblem::packed_new; [batch + 1]
  const std::int32_t* cu_seqlens_q = nullptr;    ///< AppendProblem::packed_q; [batch + 1]
  const std::int32_t* sequences = nullptr;       ///< AppendProblem::placed; [total_new or total_q]
  const std::int32_t* positions = nullptr;       ///< AppendProblem::placed; [total_new or total_q]
  const std::int32_t* page_table = nullptr;      ///< AppendProblem::page_size; [batch, page_table_stride]

  float* k_scale = nullptr;  ///< AppendProblem::scales; read, or written where they are those of rows
  float* v_scale = nullptr;
};

/// Writes the new rows, and nothing else, into the caches, and the rotated queries to q_out. One launch on a GPU.
/// Options: device and stream count.
FLASH_ATTENTION_API void append(const AppendProblem& problem, const AppendBuffers& buffers, const Options& options = {});

/// Compiles and loads what the call would need.
FLASH_ATTENTION_API void prewarm(const AppendProblem& problem, const Options& options);

}  // namespace flash_attention
