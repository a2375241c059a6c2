#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

#include "flash_attention/dtype.h"
#include "flash_attention/export.h"
#include "flash_attention/standard.h"

namespace flash_attention {

/// The largest head_dim and head_dim_v.
constexpr std::int64_t max_head_dim = 576;

/// Which elements of an 8-bit tensor share a scale. The value of an element is code * scale. nvfp4 has scales of groups,
/// and beside them none or one of the tensor.
enum class ScaleKind : std::uint8_t {
  none,    ///< every scale is 1
  tensor,  ///< [1]
  head,    ///< [batch, heads_kv]
  token,   ///< [batch, seq_kv, heads_kv], in pages [num_pages, page_size, heads_kv]
};

/// The diagonal of a causal mask or a window if seq_q != seq_kv.
enum class Alignment : std::uint8_t {
  bottom_right,  ///< the last query sees the last key: diagonal at j = i + seq_kv - seq_q
  top_left,      ///< the first query sees the first key: diagonal at j = i
};

/// How a GPU multiplies float32 (docs/numerics.md). On a CPU, and for other types, all are the same.
enum class Precision : std::uint8_t {
  ieee,       ///< in fp32
  fast,       ///< on tensor cores, each number in two parts, a product in three: as exact as fp32 sums
  automatic,  ///< the default: the same as fast; from torch, torch.get_float32_matmul_precision() decides
  tf32,       ///< on tensor cores, each number rounded to 11 significant bits
};

/// Whether the environment has FLASH_ATTENTION_INVARIANT=1. Then Problem::invariant is true by default.
FLASH_ATTENTION_API bool invariant_by_default();

enum class Pass : std::uint8_t {
  forward,
  backward,
  standard_forward,
  standard_backward,
  tangent,  ///< forward, and the tangents of its results
  second,   ///< the gradients of backward's results
};

/// Strides in elements. The last axis (head_dim) always has stride 1.
struct Strides {
  static constexpr std::int64_t dense = std::numeric_limits<std::int64_t>::min();

  std::int64_t batch = dense;  ///< ignored for packed tensors
  std::int64_t seq = dense;
  std::int64_t head = dense;

  friend bool operator==(const Strides&, const Strides&) = default;
};

/// A tensor as wide as the scores, [batch, heads_q, seq_q, seq_kv]. A stride of 0 broadcasts that axis; the last
/// stride is 1. In a packed problem the indices are those inside each sequence.
struct ScoreTensor {
  bool present = false;
  Dtype dtype = Dtype::float32;  ///< of a bias; a boolean mask is one byte an element
  std::int64_t batch_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t q_stride = 0;

  friend bool operator==(const ScoreTensor&, const ScoreTensor&) = default;
};

/// The queries from which each key is hidden: int32 [batch, heads_kv, seq_kv, bounds], packed [heads_kv, total_kv,
/// bounds]. A stride of 0 broadcasts that axis; the last two axes are dense. Key j is hidden from the queries [r0, inf)
/// with one bound (r0), from [r0, r1) with two, from [r0, r1) and [r2, r3) with four. Queries are counted within their
/// sequence.
struct HiddenRows {
  std::int32_t bounds = 0;  ///< 0 = none; 1, 2 or 4
  std::int64_t batch_stride = 0;
  std::int64_t head_stride = 0;

  friend bool operator==(const HiddenRows&, const HiddenRows&) = default;
};

/// Which blocks of block_q queries see which blocks of block_kv keys: bytes [batch, heads_q, blocks of queries, blocks
/// of keys], not 0 = visible. A stride of 0 broadcasts that axis; the last stride is 1.
struct BlockMask {
  std::int64_t block_q = 0;  ///< 0 = no block mask
  std::int64_t block_kv = 0;
  std::int64_t batch_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t q_stride = 0;

  friend bool operator==(const BlockMask&, const BlockMask&) = default;
};

/// The keys that a bit mask covers.
enum class BitMaskKind : std::uint8_t {
  none,  ///< there is no bit mask
  keys,  ///< all keys of a sequence
  /// as many of the last keys as the sequence has queries, such as a tree of drafted tokens; all others are visible
  drafts,
};

/// The keys that a query sees, one bit each, from the lowest bit of a byte up, for all heads. Buffers::bit_mask has the
/// bytes. `keys`: sequence b has the bytes from bit_mask_offsets[b] to bit_mask_offsets[b + 1], and the bits of its
/// queries follow each other without gaps. `drafts`: each query has row_bytes bytes, [batch, seq_q, row_bytes], packed
/// [total_q, row_bytes], or with offsets from there on. With offsets, a sequence without bytes has no mask.
/// docs/numerics.md, "Masks of bits".
struct BitMask {
  BitMaskKind kind = BitMaskKind::none;
  std::int64_t row_bytes = 0;  ///< drafts: bytes of a query
  bool offsets = false;        ///< Buffers::bit_mask_offsets says where a sequence begins; keys always have them

  friend bool operator==(const BitMask&, const BitMask&) = default;
};

/// The meaning of the entries of a list of keys.
enum class KeyListKind : std::uint8_t {
  none,    ///< there are no lists
  keys,    ///< keys; a key that is in a list twice counts twice
  blocks,  ///< blocks of keys; a block that is in a list twice counts once
};

/// The keys that a query attends to, as lists: int32 [batch, ceil(seq_q / block_q), heads, entries], packed [total_q,
/// heads, entries], dense. Each list is for block_q neighbouring queries. An entry outside of its sequence is no key.
struct KeyList {
  KeyListKind kind = KeyListKind::none;
  std::int64_t entries = 0;   ///< of a list
  std::int64_t heads = 1;     ///< 1: one list for all heads; heads_kv; with blocks also heads_q
  std::int64_t block_q = 1;   ///< blocks: queries that share a list; 1 in a packed problem
  std::int64_t block_kv = 1;  ///< blocks: keys of an entry
  bool counts = false;        ///< Buffers::key_counts says how many entries of a list count

  friend bool operator==(const KeyList&, const KeyList&) = default;
};

/// The computation: sizes, strides and options, no pointers. Comparable, hashable, printable.
///
///     S = scale * Q K^T;  S = softcap * tanh(S / softcap);  S += bias;  S -= slope * |i + seq_kv - seq_q - j|
///     P = dropout(softmax(S where visible, -inf elsewhere));  O = P V
struct Problem {
  std::int64_t batch = 1;
  std::int64_t seq_q = 0;   ///< packed: the longest query sequence, or a bound on it (0 = total_q)
  std::int64_t seq_kv = 0;  ///< packed: the longest key sequence, or a bound on it (0 = total_kv)
  std::int64_t heads_q = 1;
  std::int64_t heads_kv = 1;    ///< divides heads_q
  std::int64_t head_dim = 0;    ///< at most max_head_dim; fastest if a multiple of 8
  std::int64_t head_dim_v = 0;  ///< 0 = head_dim; at most 512 if latent
  Dtype dtype = Dtype::float32;

  bool packed = false;  ///< sequences are end to end; cu_seqlens say where each begins
  std::int64_t total_q = 0;
  std::int64_t total_kv = 0;

  // Dense by default: [batch, seq, heads, dim] without gaps. dq, dk, dv and dout have the shapes of q, k, v and out.
  Strides q_strides{}, k_strides{}, v_strides{}, out_strides{};
  Strides dout_strides{}, dq_strides{}, dk_strides{}, dv_strides{};

  std::optional<float> scale{};  ///< 1 / sqrt(head_dim) if not given
  float softcap = 0;             ///< 0 = off
  ScoreTensor bias{};
  bool alibi = false;
  std::int64_t alibi_batch_stride = 0;  ///< 0: one slope per head for the whole batch

  bool causal = false;  ///< the same as window_right = 0
  Alignment alignment = Alignment::bottom_right;
  std::int64_t window_left = -1;     ///< keys before the diagonal that are visible; -1 = all
  std::int64_t window_right = -1;    ///< keys after the diagonal that are visible; -1 = all
  std::int64_t attention_chunk = 0;  ///< a query sees only the keys of its chunk of this many positions; 0 = all
  ScoreTensor mask{};
  bool key_lengths = false;   ///< keys j >= key_lengths[b] are hidden; the diagonal stays where seq_kv puts it
  bool seqused_q = false;     ///< sequence b has seqused_q[b] queries; the diagonal follows. Rows past it are zero
  bool seqused_kv = false;    ///< sequence b has seqused_kv[b] keys; the diagonal follows
  bool left_padding = false;  ///< forward: keys j < left_padding[b] are hidden; the diagonal stays

  // Forward: K and V in pages of page_size rows. Row j of sequence b is row j % page_size of page page_table[b][j /
  // page_size]; k_strides.batch and v_strides.batch are the distances from page to page. seq_kv is the most keys that a
  // sequence may have; seqused_kv is how many it has. Later entries of the table are not read. With packed, only
  // queries are end to end.
  std::int64_t page_size = 0;          ///< 0 = no pages
  std::int64_t num_pages = 0;          ///< pages that k and v hold
  std::int64_t page_table_stride = 0;  ///< entries from a sequence to the next; 0 = as many as seq_kv needs

  bool sink = false;           ///< one more logit per head in the denominator
  float dropout_p = 0;         ///< in [0, 1)
  bool deterministic = false;  ///< backward: the same bits in every run
  /// The bits of a row do not depend on anything else in the call (docs/numerics.md, "Invariant bits"). Implies
  /// deterministic.
  bool invariant = invariant_by_default();

  HiddenRows hidden_rows{};
  BlockMask block_mask{};
  // A program that changes scores or hides keys, as text: docs/numerics.md, "Programs". It may read up to 8 tensors.
  std::string program{};                                       ///< empty: none
  std::array<std::array<std::int64_t, 4>, 8> program_sizes{};  ///< the sizes of each tensor it reads; 0 past its rank
  std::uint32_t program_gradients = 0;                         ///< backward: bit n requests the gradient of tensor n

  // Forward: K and V of a cache in 8 bits, or in 4. The value of an element is code * scale (docs/numerics.md). A row of 4
  // bits has head_dim / 2 bytes, and strides count bytes.
  std::optional<Dtype> kv_dtype{};        ///< of k and v; dtype if not given, otherwise a type of 8 or 4 bits
  ScaleKind kv_scales = ScaleKind::none;  ///< of 8-bit k and v, and of nvfp4
  Strides k_scale_strides{}, v_scale_strides{};

  // Forward: latent attention (MLA). A key is its value, followed by head_dim - head_dim_v further columns; k has only
  // these columns, [batch, seq_kv, heads_kv, head_dim - head_dim_v]. If both are in one cache, k begins head_dim_v
  // columns after v.
  bool latent = false;

  // Forward: queries in 8 bits with keys and values in 8 bits; dtype is then that of out (docs/numerics.md).
  /// of q; dtype if not given, otherwise kv_dtype, which is float8_e4m3 or float8_e5m2
  std::optional<Dtype> q_dtype{};
  ScaleKind q_scales = ScaleKind::none;  ///< of 8-bit q: none, tensor or head ([batch, heads_kv] for q, too)
  Strides q_scale_strides{};

  Precision precision = Precision::automatic;  ///< of float32 on a GPU

  KeyList key_list{};  ///< a query sees only keys in its list
  // Statistics of the scores and probabilities that forward writes beside lse (docs/numerics.md). In backward, key_mass
  // and entropy mean that a gradient flows through them.
  bool return_max_logit = false;
  bool return_key_mass = false;
  bool return_entropy = false;

  BitMask bit_mask{};             ///< forward
  bool sequence_windows = false;  ///< forward: sequence b also has the window sequence_windows[b]; -1 = all

  // Forward: scales (int4: and zeros) of groups of columns, where k and v are of 4 bits: as the rows of k, with
  // head_dim / kv_group numbers each.
  std::int64_t kv_group = 0;  ///< columns that share a scale; 0: 16 of nvfp4, 32 of mxfp4 and int4, which takes 64 and 128
  Strides k_group_strides{}, v_group_strides{};  ///< in scales

  friend bool operator==(const Problem&, const Problem&) = default;
};

FLASH_ATTENTION_API std::size_t hash_value(const Problem& problem);

FLASH_ATTENTION_API std::string to_string(const Problem& problem);
FLASH_ATTENTION_API std::string_view to_string(Dtype dtype);
FLASH_ATTENTION_API std::string_view to_string(Pass pass);
FLASH_ATTENTION_API std::string_view to_string(Alignment alignment);
FLASH_ATTENTION_API std::string_view to_string(ScaleKind kind);
FLASH_ATTENTION_API std::string_view to_string(Precision precision);
FLASH_ATTENTION_API std::string_view to_string(KeyListKind kind);
FLASH_ATTENTION_API std::string_view to_string(BitMaskKind kind);
FLASH_ATTENTION_API std::size_t size_of(Dtype dtype);

/// Multiplications and additions for the visible scores: 2 * (head_dim + head_dim_v) a score, 2.5 times that for
/// backward. Lengths that only the device knows (packed, key lengths, masks) count as full.
FLASH_ATTENTION_API double flops(const Problem& problem, Pass pass);

}  // namespace flash_attention
