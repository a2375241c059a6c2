#pragma once

#include <algorithm>

#include "fuzz/bytes.h"
#include "support/cases/contract.h"
#include "support/oracle/pages.h"

namespace flash_attention::fuzz {

inline ScoreTensor small_score_tensor(Bytes& bytes, const Problem& p) {
  const bool batch = bytes.flip(), head = bytes.flip(), q = bytes.flip();
  const std::int64_t rows = q ? p.seq_q : 1, heads = head ? p.heads_q : 1;
  ScoreTensor tensor;
  tensor.present = true;
  tensor.batch_stride = batch ? heads * rows * p.seq_kv : 0;
  tensor.head_stride = head ? rows * p.seq_kv : 0;
  tensor.q_stride = q ? p.seq_kv : 0;
  return tensor;
}

inline std::vector<std::int32_t> lengths_up_to(Bytes& bytes, std::int64_t count, std::int64_t longest) {
  std::vector<std::int32_t> lengths;
  for (std::int64_t n = 0; n < count; ++n) lengths.push_back(static_cast<std::int32_t>(bytes.between(0, longest)));
  return lengths;
}

/// Sequences end to end, each of any length up to the longest.
inline void pack(Bytes& bytes, testing::Case& c) {
  Problem& p = c.problem;
  const auto running = [&](std::int64_t& longest, std::int64_t& total) {
    std::vector<std::int32_t> ends{0};
    for (const std::int32_t length : lengths_up_to(bytes, p.batch, longest)) ends.push_back(ends.back() + length);
    total = ends.back();
    longest = std::min(longest, total);  // a bound on the lengths, not always the longest
    return ends;
  };
  p.packed = true;
  c.cu_seqlens_q = running(p.seq_q, p.total_q);
  c.cu_seqlens_kv = running(p.seq_kv, p.total_kv);
}

/// A valid problem small enough to be compared with the oracle, with any mix of options.
inline testing::Case small_case(Bytes& bytes, Pass pass) {
  testing::Case c;
  c.name = "fuzz";
  Problem& p = c.problem;
  p.batch = bytes.between(1, 3);
  p.seq_q = bytes.between(0, 40);
  p.seq_kv = bytes.between(0, 70);
  p.heads_kv = bytes.between(1, 2);
  p.heads_q = p.heads_kv * bytes.between(1, 3);
  p.head_dim = 8 * bytes.between(1, 6);
  p.head_dim_v = bytes.flip() ? p.head_dim : 8 * bytes.between(1, 6);
  p.dtype = static_cast<Dtype>(bytes.byte() % 3);
  if (bytes.rarely()) p.scale = 0.3f;
  if (bytes.rarely()) p.softcap = 2;
  p.causal = bytes.flip();
  p.alignment = static_cast<Alignment>(bytes.byte() % 2);
  if (bytes.rarely()) p.window_left = bytes.between(0, 40);
  if (bytes.rarely()) p.window_right = bytes.between(0, 40);
  p.alibi = bytes.rarely();
  p.sink = bytes.rarely();
  if (bytes.rarely()) p.dropout_p = 0.25f;
  p.deterministic = bytes.flip();
  if (bytes.rarely()) pack(bytes, c);
  if (!p.packed && bytes.rarely()) p.bias = small_score_tensor(bytes, p);
  if (!p.packed && bytes.rarely()) p.mask = small_score_tensor(bytes, p);
  if (!p.packed && bytes.rarely()) {
    p.key_lengths = true;
    c.key_lengths = lengths_up_to(bytes, p.batch, p.seq_kv);
  }
  if (!p.packed && bytes.rarely()) {
    p.seqused_q = p.seqused_kv = true;
    c.seqused_q = lengths_up_to(bytes, p.batch, p.seq_q);
    c.seqused_kv = lengths_up_to(bytes, p.batch, p.seq_kv);
  }
  c.dlse = bytes.flip();
  c.dbias = p.bias.present && bytes.flip();
  c.dsink = p.sink && bytes.flip();
  c.draw = static_cast<testing::Draw>(bytes.rarely() ? bytes.byte() % 5 : 0);
  c.seed = bytes.byte();
  if (pass == Pass::forward && bytes.rarely()) {
    p.left_padding = true;
    c.left_padding = lengths_up_to(bytes, p.batch, p.packed ? 0 : p.seq_kv);
  }
  if (pass == Pass::forward && !p.packed && bytes.rarely()) {
    const std::int64_t page_size = bytes.between(1, 40);
    testing::put_in_pages(c, page_size, lengths_up_to(bytes, p.batch, p.seq_kv));
  }
  return c;
}

/// Runs it on the CPU and compares every result with the fp64 oracle.
inline void run_small(const std::uint8_t* data, std::size_t size) {
  Bytes bytes(data, size);
  const Pass pass = static_cast<Pass>(bytes.byte() % 4);
  const testing::Case c = small_case(bytes, pass);
  SCOPED_TRACE(std::string(to_string(pass)) + ": " + to_string(c.problem));
  testing::check(c, {.pass = pass});
}

}  // namespace flash_attention::fuzz
