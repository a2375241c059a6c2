#pragma once

#include <array>
#include <cstddef>
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

  bool q_norm = false;                ///< rows of q are divided by their root mean square, before they are rotated
  bool k_norm = false;                ///< rows of k
  bool norm_plus_one = false;         ///< the factor of a column is 1 + its weight
  Dtype norm_dtype = Dtype::float32;  ///< of the norms' weights
  float norm_eps = 1e-6f;             ///< is added to the mean square
  std::int64_t angle_sections = 0;    ///< rows of angle_positions, up to 4; 0: angles follow from lengths
  std::array<std::int32_t, 4> rotary_sections{};  ///< pairs that each of them turns; more than one
  bool sections_interleaved = false;  ///< pair p is of section p mod angle_sections, while that one has pairs left
  bool in_rows = false;  ///< no cache: k goes to k_cache as q goes to q_out, in the shape of k, and there is no v
  Strides dq_out_strides{}, dk_out_strides{}, dq_strides{}, dk_strides{};  ///< in_rows: of AppendGradients

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

  const void* q_norm_weight = nullptr;            ///< [head_dim]; null: all are 1
  const void* k_norm_weight = nullptr;            ///< [head_dim]
  const std::int32_t* angle_positions = nullptr;  ///< AppendProblem::angle_sections; [angle_sections, tokens]
};

/// Pointers to memory of Options::device.
struct AppendGradients {
  const void* dq_out = nullptr;     ///< the gradient of q_out, in its shape
  const void* dk_out = nullptr;     ///< of k_cache
  void* dq = nullptr;               ///< in the shape of q
  void* dk = nullptr;               ///< of k
  float* dq_norm_weight = nullptr;  ///< [head_dim]; null: not wanted
  float* dk_norm_weight = nullptr;  ///< [head_dim]
  void* workspace = nullptr;        ///< append_backward_workspace() bytes
};

/// Writes the new rows, and nothing else, into the caches, and the rotated queries to q_out. One launch on a GPU.
/// Options: device and stream count.
FLASH_ATTENTION_API void append(const AppendProblem& problem, const AppendBuffers& buffers, const Options& options = {});

/// Gradients of append() of a problem with in_rows: of q, k and the norms' weights. The same bits for the same call.
FLASH_ATTENTION_API void append_backward(const AppendProblem& problem, const AppendBuffers& buffers,
                                         const AppendGradients& gradients, const Options& options = {});

/// What append_backward() needs.
FLASH_ATTENTION_API std::size_t append_backward_workspace(const AppendProblem& problem);

/// Compiles and loads what the call would need.
FLASH_ATTENTION_API void prewarm(const AppendProblem& problem, const Options& options);

}  // namespace flash_attention
