#pragma once

#include <array>
#include <optional>
#include <string>

#include "tensor.h"

namespace flash_attention::python {

/// What a call is besides its tensors; the order in which Python gives them.
struct Scalars {
  std::int64_t max_seqlen_q = 0;
  std::int64_t max_seqlen_kv = 0;
  std::optional<float> scale;
  float softcap = 0;
  bool causal = false;
  bool top_left = false;
  std::int64_t window_left = -1;
  std::int64_t window_right = -1;
  float dropout_p = 0;
  bool deterministic = false;
  bool heads_first = false;  ///< [batch, heads, seq, head_dim]
  bool standard = false;     ///< the textbook algorithm
  std::string kernel;
  std::int64_t mask_block_q = 0;  ///< of a block mask
  std::int64_t mask_block_kv = 0;

  bool operator==(const Scalars&) const = default;
};

/// From a tuple with the values in that order.
Scalars scalars_of(const nb::tuple& scalars);

/// The tensors that a call reads besides those of one pass, in the order in which Python gives them.
enum Slot {
  q,
  k,
  v,
  bias,
  mask,
  alibi_slopes,
  sink,
  cu_seqlens_q,
  cu_seqlens_kv,
  seqused_q,
  seqused_kv,
  key_lengths,
  hidden_rows,
  block_mask,
  page_table,  // K and V are [num_pages, page_size, heads, head_dim]
  left_padding,
  k_scale,  // of K and V in 8 bits
  v_scale,
  q_scale,  // of Q in 8 bits
  num_slots
};
constexpr std::array<const char*, num_slots> slot_names = {"q",
                                                           "k",
                                                           "v",
                                                           "bias",
                                                           "mask",
                                                           "alibi_slopes",
                                                           "sink",
                                                           "cu_seqlens_q",
                                                           "cu_seqlens_kv",
                                                           "seqused_q",
                                                           "seqused_kv",
                                                           "key_lengths",
                                                           "hidden_rows",
                                                           "block_mask",
                                                           "page_table",
                                                           "left_padding",
                                                           "k_scale",
                                                           "v_scale",
                                                           "q_scale"};
using Slots = std::array<Tensor, num_slots>;  ///< absent ones have no data and rank -1

/// The tensors of a backward pass.
struct Gradients {
  Tensor dout, dlse, dq, dk, dv, dbias, dsink;
};

/// One call of the library: Problem, Buffers and Options from tensors. Refuses by argument what the Problem cannot hold.
class Call {
 public:
  /// `codes`: what the bytes of K and V are, where they are of 8 bits, and those of Q where it has bytes,
  /// too: then the type of out is the problem's. `latent`: K has the columns of a key behind its
  /// value.
  Call(const Slots& tensors, const Scalars& scalars, const std::string& codes = {}, bool latent = false);
  Call(const Call&) = delete;  // options.kernel points into it

  void set_forward(const Tensor& out, const Tensor& lse, std::uint64_t seed, std::uint64_t offset);
  void set_gradients(const Gradients& gradients);

  Pass pass(bool backward) const;
  void choose(bool backward);  ///< a kernel named for the other pass is none of this one: the planner chooses
  std::size_t workspace(bool backward) const { return workspace_bytes(problem, pass(backward), options); }
  void set_workspace(void* memory, std::size_t bytes);  ///< `memory` has workspace_alignment bytes more than `bytes`
  void run(bool backward) const;

  static constexpr std::size_t workspace_alignment = 256;

  Problem problem;
  Buffers buffers;
  Options options;

 private:
  void read_pages(const Slots& tensors);
  void read_scales(const Slots& tensors);
  std::int64_t key_columns() const { return problem.head_dim - (problem.latent ? problem.head_dim_v : 0); }  ///< of K
  void read_query_scale(const Tensor& scale);
  Strides strides_of(const Tensor& tensor) const;
  void read_hidden_rows(const Tensor& tensor);
  void read_block_mask(const Tensor& tensor, const Scalars& scalars);
  const void* score_tensor(const Tensor& tensor, bool boolean, ScoreTensor& out) const;
  const std::int32_t* lengths(const Tensor& tensor, std::int64_t count) const;
  const Tensor& like(const Tensor& tensor, std::int64_t seq, std::int64_t heads, std::int64_t dim) const;
  const Tensor& here(const Tensor& tensor) const;

  int batch_axis_ = 0, seq_axis_ = 1, head_axis_ = 2, dim_axis_ = 3;
  bool standard_ = false;
  bool invariant_ = false;
  std::string kernel_;
};

}  // namespace flash_attention::python
