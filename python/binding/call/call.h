#pragma once

#include <array>
#include <optional>
#include <string>

#include "flash_attention/planned_call.h"
#include "options.h"
#include "tensor.h"

namespace flash_attention::python {

/// Reads a tuple with the values in the order of the list; values after its end keep their defaults.
CallOptions options_of(const nb::tuple& given);

/// Such a tuple.
nb::tuple tuple_of(const CallOptions& options);

/// Adds options, ((name, kind, default), ...), and tensors, (name, ...): the arguments of a call.
void add_options(nb::module_& module);

// clang-format off
/// The tensors that a call of any pass reads, in the order in which Python passes them.
#define FLASH_ATTENTION_CALL_TENSORS(X)                                                \
  X(q) X(k) X(v) X(bias) X(mask) X(alibi_slopes) X(sink)                               \
  X(cu_seqlens_q) X(cu_seqlens_kv) X(seqused_q) X(seqused_kv) X(key_lengths)           \
  X(hidden_rows) X(block_mask)                                                         \
  X(key_indices) X(key_blocks) X(key_counts)                                           \
  X(page_table)         /* K and V are [num_pages, page_size, heads, head_dim] */      \
  X(left_padding)                                                                      \
  X(bit_mask) X(bit_mask_offsets) X(sequence_windows)                                  \
  X(k_scale) X(v_scale) /* of K and V in 8 bits */                                     \
  X(q_scale)            /* of Q in 8 bits */                                             \
  X(k_zero) X(v_zero) X(k_global_scale) X(v_global_scale) /* of K and V in 4 bits, with k_scale and v_scale of groups */
// clang-format on

enum Slot {
#define FLASH_ATTENTION_SLOT(name) name,
  FLASH_ATTENTION_CALL_TENSORS(FLASH_ATTENTION_SLOT) num_slots
#undef FLASH_ATTENTION_SLOT
};
constexpr std::array<const char*, num_slots> slot_names = {
#define FLASH_ATTENTION_NAME(name) #name,
    FLASH_ATTENTION_CALL_TENSORS(FLASH_ATTENTION_NAME)
#undef FLASH_ATTENTION_NAME
};
using Slots = std::array<Tensor, num_slots>;  ///< absent ones have no data and rank -1

/// The tensors of a backward pass.
struct Gradients {
  Tensor dout, dlse, dq, dk, dv, dbias, dsink;
};

/// The tensors of statistics: those that forward writes, and those that backward reads.
struct Statistics {
  Tensor max_logit, key_mass, entropy, dkey_mass, dentropy;
};

/// The tensors of forward mode and of second derivatives: each is absent, or laid out like the tensor it is a tangent of.
struct Tangents {
  Tensor q, k, v, bias, sink, out, lse;
};

/// One call of the library: Problem, Buffers and Options from tensors. Refuses, by the argument's name, values that a
/// Problem cannot hold.
class Call {
 public:
  /// `codes`: the type of K and V in 8 bits, and of Q if it has 8 bits, too: then the problem's type is that of out.
  /// `latent`: K has the columns of a key that follow its value.
  /// `given.kernel`: "", NAME, NAME@QxKV or @QxKV, a tile of Q queries and KV keys.
  Call(const Slots& tensors, const CallOptions& given, const std::string& codes = {}, bool latent = false);
  Call(const Call&) = delete;  // options.kernel points into it

  void set_forward(const Tensor& out, const Tensor& lse, std::uint64_t seed, std::uint64_t offset);
  void set_gradients(const Gradients& gradients);
  void set_statistics(const Statistics& statistics);
  /// The call is one of Pass::tangent or Pass::second. After set_forward().
  void set_tangents(Pass pass, const Slots& tensors, const Tensor& out, const Tangents& tangents);

  Pass pass(bool backward) const;
  void choose(bool backward);                           ///< ignores a kernel or tile of the other pass: the planner chooses
  std::size_t plan(bool backward);                      ///< returns the bytes of workspace that the call needs
  void set_workspace(void* memory, std::size_t bytes);  ///< `memory` has workspace_alignment bytes more than `bytes`
  void run() const;                                     ///< as planned

  static constexpr std::size_t workspace_alignment = 256;

  Problem problem;
  Buffers buffers;
  Options options;

 private:
  void read_pages(const Slots& tensors);
  void read_bit_mask(const Slots& tensors);
  void read_sequence_windows(const Tensor& windows);
  void read_scales(const Slots& tensors);
  void read_groups(const Slots& tensors);
  std::int64_t key_columns() const { return problem.head_dim - (problem.latent ? problem.head_dim_v : 0); }  ///< of K
  void read_query_scale(const Tensor& scale);
  Strides strides_of(const Tensor& tensor) const;
  void read_hidden_rows(const Tensor& tensor);
  void read_block_mask(const Tensor& tensor, const CallOptions& given);
  void read_key_list(const Slots& tensors, const CallOptions& given);
  void read_slopes(const Tensor& slopes);
  void read_sink(const Tensor& sink);
  const void* score_tensor(const Tensor& tensor, bool boolean, ScoreTensor& out) const;
  const std::int32_t* lengths(const Tensor& tensor, std::int64_t count) const;
  const Tensor& like(const Tensor& tensor, std::int64_t seq, std::int64_t heads, std::int64_t dim) const;
  void refuse_choices(const CallOptions& given) const;  ///< if bits are invariant
  const Tensor& here(const Tensor& tensor) const;

  Dtype kv_dtype_ = Dtype::float32;  ///< of K and V in 8 or 4 bits
  int batch_axis_ = 0, seq_axis_ = 1, head_axis_ = 2, dim_axis_ = 3;
  bool standard_ = false;
  std::optional<Pass> derivative_;  // instead of forward and backward
  std::string kernel_;
  std::optional<TileSize> tile_;
  std::optional<PlannedCall> planned_;
};

}  // namespace flash_attention::python
