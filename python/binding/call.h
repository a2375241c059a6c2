#pragma once

#include <array>

#include "tensor.h"

namespace flash_attention::python {

/// One call of the library, made from Python's arguments. Keeps the tensors it points into.
///
/// `tensors` is (q, k, v, bias, mask, alibi_slopes, sink, cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv,
/// key_lengths), None where absent; `scalars` is (max_seqlen_q, max_seqlen_kv, scale, softcap, causal, top_left,
/// window_left, window_right, dropout_p, deterministic, heads_first, standard, kernel).
class Call {
 public:
  Call(nb::tuple tensors, nb::tuple scalars);

  void set_forward(nb::handle out, nb::handle lse, std::uint64_t seed, std::uint64_t offset);

  /// `results` is (out, lse), `gradients` is (dout, dlse, dq, dk, dv, dbias, dsink).
  void set_backward(nb::tuple results, nb::tuple gradients, std::uint64_t seed, std::uint64_t offset);

  Pass pass(bool backward) const;

  /// Runs the pass, on `stream` where q's library does not say which; `allocate(bytes)` gives a workspace if one is needed.
  void run(bool backward, std::uintptr_t stream, nb::handle allocate);

  Problem problem;
  Buffers buffers;
  Options options;

 private:
  static constexpr int max_tensors = 12 + 9;

  const Tensor& add(nb::handle object, const char* name, bool writable = false);
  Strides strides_of(const Tensor& tensor) const;
  const void* score_tensor(nb::handle object, const char* name, bool boolean, ScoreTensor& out);
  const std::int32_t* lengths(nb::handle object, const char* name, std::int64_t count);
  const Tensor& like(const Tensor& tensor, std::int64_t seq, std::int64_t heads, std::int64_t dim);

  std::array<Tensor, max_tensors> tensors_;
  int num_tensors_ = 0;
  int batch_axis_ = 0, seq_axis_ = 1, head_axis_ = 2, dim_axis_ = 3;
  bool standard_ = false;
  std::string kernel_;
};

}  // namespace flash_attention::python
