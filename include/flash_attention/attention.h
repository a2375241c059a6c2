#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

#include "flash_attention/device.h"
#include "flash_attention/error.h"
#include "flash_attention/export.h"
#include "flash_attention/plan.h"
#include "flash_attention/problem.h"

/// Exact attention in O(seq) memory, forward and backward, on CPUs and NVIDIA GPUs.
///
///     flash_attention::Problem problem{.batch = 2, .seq_q = 1024, .seq_kv = 1024, .heads_q = 8, .heads_kv = 8,
///                                      .head_dim = 64, .causal = true};
///     flash_attention::forward(problem, {.q = q, .k = k, .v = v, .out = out, .lse = lse});
namespace flash_attention {

/// The pointers of a call, and nothing else. The Problem decides which of them must be set; a wrong one is refused by
/// name. They point to memory of Options::device. Shapes use the names of the Problem's fields.
struct Buffers {
  const void* q = nullptr;  ///< [batch, seq_q, heads_q, head_dim]; packed: [total_q, heads_q, head_dim]
  const void* k = nullptr;  ///< [batch, seq_kv, heads_kv, head_dim]; packed: [total_kv, heads_kv, head_dim];
                            ///< pages: [num_pages, page_size, heads_kv, head_dim]
                            ///< latent: head_dim - head_dim_v columns, those after the value's
  const void* v = nullptr;  ///< the same with head_dim_v
  void* out = nullptr;      ///< [batch, seq_q, heads_q, head_dim_v]; forward writes it, backward reads it
  float* lse = nullptr;     ///< [batch, heads_q, seq_q]; packed: [heads_q, total_q]. May be null in forward

  const void* bias = nullptr;           ///< Problem::bias
  const std::uint8_t* mask = nullptr;   ///< Problem::mask; nonzero = visible
  const float* alibi_slopes = nullptr;  ///< Problem::alibi; [heads_q] or [batch, heads_q]
  const float* sink = nullptr;          ///< Problem::sink; [heads_q]

  const std::int32_t* cu_seqlens_q = nullptr;   ///< Problem::packed; [batch + 1]
  const std::int32_t* cu_seqlens_kv = nullptr;  ///< Problem::packed without pages; [batch + 1]
  const std::int32_t* seqused_q = nullptr;      ///< Problem::seqused_q; [batch]
  const std::int32_t* seqused_kv = nullptr;     ///< Problem::seqused_kv; [batch]
  const std::int32_t* key_lengths = nullptr;    ///< Problem::key_lengths; [batch]
  const std::int32_t* left_padding = nullptr;   ///< Problem::left_padding; [batch]
  const std::int32_t* page_table = nullptr;     ///< Problem::page_size; [batch, page_table_stride]
  const std::int32_t* hidden_rows = nullptr;    ///< Problem::hidden_rows
  const std::uint8_t* block_mask = nullptr;     ///< Problem::block_mask; nonzero = visible

  const void* const* program_tensors = nullptr;  ///< Problem::program: a pointer to each tensor that it reads, dense
  const double* program_scalars = nullptr;       ///< Problem::program: its scalars, in host memory
  const float* k_scale = nullptr;                ///< Problem::kv_scales; [1], [batch, heads_kv] or as the rows of k
  const float* v_scale = nullptr;                ///< the same for v
  const float* q_scale = nullptr;                ///< Problem::q_scales; [1] or [batch, heads_kv]

  // Backward only. Gradients are overwritten, never added to.
  const void* dout = nullptr;   ///< shape of out
  const float* dlse = nullptr;  ///< shape of lse; may be null (no gradient through lse)
  void* dq = nullptr;           ///< shape of q
  void* dk = nullptr;           ///< shape of k
  void* dv = nullptr;           ///< shape of v
  void* dbias = nullptr;        ///< dense [batch|1, heads_q|1, seq_q|1, seq_kv], 1 if bias broadcasts; may be null
  float* dsink = nullptr;       ///< [heads_q]; may be null
  /// Problem::program_gradients: one pointer for each tensor; float32, dense
  float* const* program_gradients = nullptr;

  const std::int32_t* key_list = nullptr;    ///< Problem::key_list
  const std::int32_t* key_counts = nullptr;  ///< KeyList::counts; the shape of key_list without its last axis
  /// With lists of keys, forward: the largest score of each row, -inf if there is none. Layout of lse, without the sink; may
  /// be null.
  float* row_max = nullptr;
  // Statistics. Forward writes them, backward reads entropy and the gradients.
  float* max_logit = nullptr;        ///< Problem::return_max_logit; [batch, heads_q]
  float* key_mass = nullptr;         ///< Problem::return_key_mass, which needs lse, too; [batch, heads_q, seq_kv]; packed:
                                     ///< [heads_q, total_kv]
  float* entropy = nullptr;          ///< Problem::return_entropy; shape of lse
  const float* dkey_mass = nullptr;  ///< backward: Problem::return_key_mass; shape of key_mass
  const float* dentropy = nullptr;   ///< backward: Problem::return_entropy; shape of lse

  // tangent() and second(): each tangent has the shape, type and strides of its tensor. Null inputs are 0, null results
  // are not written.
  const void* q_tangent = nullptr;
  const void* k_tangent = nullptr;
  const void* v_tangent = nullptr;
  const void* bias_tangent = nullptr;
  const float* sink_tangent = nullptr;
  void* out_tangent = nullptr;
  float* lse_tangent = nullptr;

  const std::uint8_t* bit_mask = nullptr;          ///< Problem::bit_mask
  const std::int32_t* bit_mask_offsets = nullptr;  ///< BitMask::offsets; [batch + 1], in bytes of bit_mask
  const std::int32_t* sequence_windows = nullptr;  ///< Problem::sequence_windows; [batch, 2], left and right

  // Problem::kv_dtype of 4 bits: as the rows of k and v, with head_dim / kv_group numbers each.
  const void* k_group_scale = nullptr;  ///< e4m3 (nvfp4), e8m0 (mxfp4) or dtype (int4)
  const void* v_group_scale = nullptr;
  const void* k_group_zero = nullptr;  ///< int4: of dtype; what the code 0 is worth
  const void* v_group_zero = nullptr;
};

/// The facts about a call's masks that a GPU computes before it attends, kept for later calls: docs/masks.md, "Prepared
/// masks".
struct PreparedMask {
  const void* data = nullptr;  ///< on the device; null: the call computes them itself
  std::uint64_t stamp = 0;     ///< a call checks by it that they belong to its masks
};

/// How one call runs. Nothing here changes the result, except the dropout seed.
struct Options {
  Device device{};                   ///< where the buffers are and the work runs
  void* stream = nullptr;            ///< CUDA: the caller's CUstream; the call returns before the work is done
  void* workspace = nullptr;         ///< at least workspace_bytes(...) bytes, 256-byte aligned, on the device
  std::size_t workspace_bytes = 0;   ///< the bytes at `workspace`
  std::uint64_t seed = 0;            ///< dropout
  std::uint64_t offset = 0;          ///< dropout
  std::uint32_t* repairs = nullptr;  ///< a counter on the device; forward/sm90 adds the number of tiles that it repeats
  std::string_view kernel{};         ///< empty: the planner chooses; otherwise a name such as "forward/sm90"
  /// CUDA: the first forward begins to compile the kernels of backward, in the background
  bool backward_follows = false;
  PreparedMask prepared_mask{};   ///< from prepare_mask, for the same pass; the workspace is smaller then
  std::optional<TileSize> tile{};      ///< instead of the kernel's choice, for experiments
  std::optional<BackwardPart> part{};  ///< instead of the whole pass; backward/sm90 has parts
};

/// out = softmax(score(q, k)) v, and lse.
FLASH_ATTENTION_API void forward(const Problem& problem, const Buffers& buffers, const Options& options = {});

/// Gradients from out, lse and dout.
FLASH_ATTENTION_API void backward(const Problem& problem, const Buffers& buffers, const Options& options = {});

/// out, lse and their tangents, from those of q, k, v, bias and sink (docs/numerics.md, "Forward mode").
FLASH_ATTENTION_API void tangent(const Problem& problem, const Buffers& buffers, const Options& options = {});

/// Second derivatives: the gradients of F = sum of dq q_tangent + dk k_tangent + dv v_tangent (+ dbias bias_tangent +
/// dsink sink_tangent), where backward computes dq ... dsink from dout and dlse. Reads the inputs of backward and the
/// tangents. Writes dF / dq .. dF / dsink to dq, dk, dv, dbias and dsink, dF / ddout to out_tangent and dF / ddlse to
/// lse_tangent (docs/numerics.md, "Second derivatives").
FLASH_ATTENTION_API void second(const Problem& problem, const Buffers& buffers, const Options& options = {});

/// The textbook algorithm, which stores the full score matrices in the workspace: a baseline to compare with.
FLASH_ATTENTION_API void standard_forward(const Problem& problem, const Buffers& buffers, const Options& options = {});
FLASH_ATTENTION_API void standard_backward(const Problem& problem, const Buffers& buffers, const Options& options = {});

/// Bytes of workspace that the call needs, often 0.
FLASH_ATTENTION_API std::size_t workspace_bytes(const Problem& problem, Pass pass, const Options& options = {});

/// The memory that prepare_mask needs, and the calls that can use its result.
struct MaskPreparation {
  std::size_t bytes = 0;      ///< of memory on the device; 0: there is nothing to prepare, as on a CPU
  std::uint64_t stamp = 0;    ///< equal for all calls that can use the same prepared mask
  std::uint32_t tensors = 0;  ///< bit n: the result depends on the contents of tensor n of Problem::program
};
FLASH_ATTENTION_API MaskPreparation mask_preparation(const Problem& problem, Pass pass, const Buffers& buffers,
                                                     const Options& options = {});

/// Computes the facts about a call's masks, for Options::prepared_mask of later calls on any stream that waits for this
/// one. `memory`: mask_preparation().bytes, 256-byte aligned, on the device. Of `buffers` it reads those that hide
/// keys: mask, hidden_rows, block_mask, program_tensors, program_scalars, cu_seqlens. If their contents change, prepare
/// the mask again: a call refuses other pointers, scalars, sizes and kernels, but it cannot see that memory has
/// changed.
FLASH_ATTENTION_API PreparedMask prepare_mask(const Problem& problem, Pass pass, const Buffers& buffers, void* memory,
                                              std::size_t bytes, const Options& options = {});

/// The kernel that the call would use, and for each faster one why it was not chosen: text for people.
FLASH_ATTENTION_API std::string explain(const Problem& problem, Pass pass, const Options& options = {});

/// Whether dropout keeps the score of query i and key j. The same function on every backend; docs/numerics.md.
FLASH_ATTENTION_API bool dropout_keeps(std::uint64_t seed, std::uint64_t offset, float dropout_p, std::int64_t batch_idx,
                                       std::int64_t head_idx, std::int64_t heads_q, std::int64_t i, std::int64_t j);

}  // namespace flash_attention
