#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "flash_attention/attention.h"
#include "flash_attention/export.h"
#include "flash_attention/problem.h"

namespace flash_attention {

/// One call of append(): new rows for a cache of keys and values, and the rotary embedding of queries and keys. It
/// holds sizes, strides and options. docs/numerics.md has the formulas.
struct AppendProblem {
  std::int64_t batch = 1;
  std::int64_t seq_new = 0;  ///< new rows of each sequence; 0: only queries are rotated. Ignored if they are packed
  std::int64_t seq_q = 0;    ///< queries of each sequence; 0: none are rotated. Ignored if they are packed
  std::int64_t heads_q = 1;
  std::int64_t heads_kv = 1;
  std::int64_t head_dim = 0;
  std::int64_t head_dim_v = 0;          ///< 0 = head_dim
  Dtype dtype = Dtype::float32;         ///< of q, k and v
  std::optional<Dtype> cache_dtype{};   ///< dtype if not given; with types of 8 and 4 bits rows are quantised
  Dtype rotary_dtype = Dtype::float32;  ///< of cos and sin

  bool packed_new = false;  ///< new rows are end to end: cu_seqlens_new
  bool packed_q = false;    ///< queries are end to end: cu_seqlens_q
  /// sequences and positions say where every new row belongs; and every query, of which there are as many
  bool placed = false;
  std::int64_t total_new = 0;  ///< packed or placed: new rows of all sequences
  std::int64_t total_q = 0;    ///< packed or placed: queries of all sequences

  Strides q_strides{}, q_out_strides{}, k_strides{}, v_strides{};  ///< packed or placed: the batch stride is ignored
  Strides k_cache_strides{}, v_cache_strides{};                    ///< pages: the batch stride is from page to page

  /// rows of the cache for a sequence; pages: 0 = as many as page_table_stride pages have
  std::int64_t capacity = 0;
  std::int64_t page_size = 0;          ///< 0 = no pages
  std::int64_t num_pages = 0;          ///< pages in the caches
  std::int64_t page_table_stride = 0;  ///< entries from a sequence to the next; 0 = as many as capacity needs

  std::int64_t rotary_dim = 0;        ///< the first dimensions, which are rotated; 0 = none; even
  std::int64_t rotary_positions = 0;  ///< rows of cos and sin
  std::int64_t rotary_stride = 0;     ///< elements from a row of cos and sin to the next; 0 = rotary_dim / 2
  /// a pair is two neighbours, instead of two dimensions that are rotary_dim / 2 apart
  bool rotary_interleaved = false;
  bool rotary_offsets = false;    ///< the first angle of each sequence is rotary_offsets[b], not lengths[b]
  bool rotary_one_query = false;  ///< all queries of a sequence have the angle of its first query

  ScaleKind scales = ScaleKind::none;  ///< of an 8-bit cache, and of nvfp4; scales of rows are written
  Strides k_scale_strides{}, v_scale_strides{};

  bool q_norm = false;                ///< rows of q are divided by their root mean square, before they are rotated
  bool k_norm = false;                ///< the same for rows of k
  bool norm_plus_one = false;         ///< the factor of a column is 1 + its weight
  Dtype norm_dtype = Dtype::float32;  ///< of the weights of the norms
  float norm_eps = 1e-6f;             ///< added to the mean square
  std::int64_t angle_sections = 0;    ///< rows of angle_positions, up to 4; 0: angles follow from lengths
  std::array<std::int32_t, 4> rotary_sections{};  ///< pairs that each section rotates, if there is more than one
  /// pair p belongs to section p mod angle_sections, as long as that one has pairs left
  bool sections_interleaved = false;
  bool in_rows = false;  ///< no cache: k_cache has the shape of k, as q_out has that of q, and there is no v
  Strides dq_out_strides{}, dk_out_strides{}, dq_strides{}, dk_strides{};  ///< in_rows: of AppendGradients
  std::int64_t cache_group = 0;  ///< of a cache of 4 bits, as Problem::kv_group
  Strides k_group_strides{}, v_group_strides{};  ///< of its groups' scales and zeros, which are written

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

  /// [batch]; rows that each sequence has already. Not with placed; null = none has any
  const std::int32_t* lengths = nullptr;
  const std::int32_t* rotary_offsets = nullptr;  ///< AppendProblem::rotary_offsets; [batch]
  const std::int32_t* cu_seqlens_new = nullptr;  ///< AppendProblem::packed_new; [batch + 1]
  const std::int32_t* cu_seqlens_q = nullptr;    ///< AppendProblem::packed_q; [batch + 1]
  const std::int32_t* sequences = nullptr;       ///< AppendProblem::placed; [total_new or total_q]
  const std::int32_t* positions = nullptr;       ///< AppendProblem::placed; [total_new or total_q]
  const std::int32_t* page_table = nullptr;      ///< AppendProblem::page_size; [batch, page_table_stride]

  float* k_scale = nullptr;  ///< AppendProblem::scales; read, or written if each row has its own
  float* v_scale = nullptr;

  const void* q_norm_weight = nullptr;            ///< [head_dim]; null: all weights are 1
  const void* k_norm_weight = nullptr;            ///< [head_dim]
  const std::int32_t* angle_positions = nullptr;  ///< AppendProblem::angle_sections; [angle_sections, tokens]

  void* k_group_scale = nullptr;  ///< cache_dtype of 4 bits; as the rows of the caches, written
  void* v_group_scale = nullptr;
  void* k_group_zero = nullptr;  ///< int4
  void* v_group_zero = nullptr;
};

/// Pointers to memory of Options::device.
struct AppendGradients {
  const void* dq_out = nullptr;     ///< the gradient of q_out, in its shape
  const void* dk_out = nullptr;     ///< the gradient of k_cache
  void* dq = nullptr;               ///< in the shape of q
  void* dk = nullptr;               ///< in the shape of k
  float* dq_norm_weight = nullptr;  ///< [head_dim]; null: not computed
  float* dk_norm_weight = nullptr;  ///< [head_dim]
  void* workspace = nullptr;        ///< append_backward_workspace() bytes
};

/// Writes the new rows to the caches, and nothing else there, and the rotated queries to q_out. One launch on a GPU. Of
/// the options, only device and stream are read.
FLASH_ATTENTION_API void append(const AppendProblem& problem, const AppendBuffers& buffers, const Options& options = {});

/// Gradients of append() for a problem with in_rows: of q, k and the norms' weights. The same call gives the same bits.
FLASH_ATTENTION_API void append_backward(const AppendProblem& problem, const AppendBuffers& buffers,
                                         const AppendGradients& gradients, const Options& options = {});

/// Bytes of workspace that append_backward() needs.
FLASH_ATTENTION_API std::size_t append_backward_workspace(const AppendProblem& problem);

/// Compiles and loads everything that the call would need.
FLASH_ATTENTION_API void prewarm(const AppendProblem& problem, const Options& options);

}  // namespace flash_attention
