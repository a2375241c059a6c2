#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "check/formula.h"
#include "flash_attention/attention.h"

namespace flash_attention::check {

/// Returns bytes of the call's device, readable on the host: the memory itself, or a copy in `scratch`.
using Fetch = std::function<const char*(const void* from, std::size_t bytes, std::vector<char>& scratch)>;

/// One sequence of the batch: its place, and the part of it that counts.
struct Sequence : Extent {
  std::int64_t first_q = 0, first_kv = 0;  // rows before it in a packed tensor
  std::int64_t rows_q = 0, rows_kv = 0;    // of the sequence
};

/// Rows of numbers with one stride: row j begins at base + j * stride.
struct Rows {
  const void* base = nullptr;
  Dtype dtype = Dtype::float32;
  std::int64_t stride = 0, width = 0;  // elements
};

class ProgramScore;

/// A finished call, as a reader of its memory. The problem is normalised.
class Call {
 public:
  Call(const Problem& problem, const Buffers& buffers, const Options& options, Fetch fetch);
  ~Call();

  const Problem& problem;
  const Buffers& buffers;
  const Options& options;

  Sequence sequence(std::int64_t b) const;

  const char* fetch(const void* from, std::size_t bytes, std::vector<char>& scratch) const {
    return fetch_(from, bytes, scratch);
  }

  /// Reads rows [begin, end), one after another, as fp64.
  std::vector<double> read(const Rows& rows, std::int64_t begin, std::int64_t end) const;
  std::vector<double> read_row(const Rows& rows, std::int64_t i) const { return read(rows, i, i + 1); }
  /// The same for keys or values of sequence b, from either tensor; they may be in pages.
  std::vector<double> read_keys(const void* tensor, const Strides& strides, std::int64_t width, std::int64_t b,
                                std::int64_t kv_head, std::int64_t begin, std::int64_t end) const;

  /// Reads whole keys: latent keys with their values before them.
  std::vector<double> read_whole_keys(std::int64_t b, std::int64_t kv_head, std::int64_t begin, std::int64_t end) const;

  /// Rows of queries: of q, out, dout or dq.
  Rows queries(const void* tensor, const Strides& strides, std::int64_t width, std::int64_t b, std::int64_t head) const;
  /// lse or dlse of one head, one number a row.
  Rows statistics(const float* tensor, std::int64_t b, std::int64_t head) const;
  /// bias[b, h, :, j] to bias[b, h, :, j + width - 1]: rows of `width` scores.
  Rows biases(std::int64_t b, std::int64_t head, std::int64_t j, std::int64_t width) const;
  /// Whether there is a mask of any kind; and what the masks show of rows [begin, end) and `width` keys from j on.
  bool has_masks() const;
  std::vector<char> mask(std::int64_t b, std::int64_t head, std::int64_t begin, std::int64_t end, std::int64_t j,
                         std::int64_t width) const;

  /// How often the lists of rows [begin, end) name each of the `width` keys from j on; once each if there are no lists.
  std::vector<std::int64_t> listed(std::int64_t b, std::int64_t head, std::int64_t begin, std::int64_t end, std::int64_t j,
                                   std::int64_t width) const;

  /// Applies the program to scores; null if there is none.
  const ProgramScore* program() const;

  double q_scale(std::int64_t b, std::int64_t head) const;                               // of 8-bit q; 1 without
  double slope(std::int64_t b, std::int64_t head) const;                                 // of ALiBi; 0 without
  double sink(std::int64_t head) const;                                                  // -inf without
  double kept(std::int64_t b, std::int64_t head, std::int64_t i, std::int64_t j) const;  // dropout's factor
  std::int64_t kv_head(std::int64_t head) const { return head / (problem.heads_q / problem.heads_kv); }

 private:
  /// read_keys without scales.
  std::vector<double> read_codes(const void* tensor, const Strides& strides, std::int64_t width, std::int64_t b,
                                 std::int64_t kv_head, std::int64_t begin, std::int64_t end) const;

  /// read_keys of 4 bits, with the scales of groups.
  std::vector<double> read_groups(bool of_k, std::int64_t width, std::int64_t b, std::int64_t kv_head, std::int64_t begin,
                                  std::int64_t end) const;

  void hide_rows(std::int64_t b, std::int64_t head, std::int64_t begin, std::int64_t end, std::int64_t j,
                 std::int64_t width, std::vector<char>& shown) const;
  void hide_bits(std::int64_t b, std::int64_t begin, std::int64_t end, std::int64_t j, std::int64_t width,
                 std::vector<char>& shown) const;
  void hide_blocks(std::int64_t b, std::int64_t head, std::int64_t begin, std::int64_t end, std::int64_t j,
                   std::int64_t width, std::vector<char>& shown) const;
  std::int64_t length(const std::int32_t* lengths, std::int64_t b, std::int64_t otherwise) const;
  float number(const float* numbers, std::int64_t index) const;

  Fetch fetch_;
  mutable std::vector<char> scratch_;
  mutable std::unique_ptr<ProgramScore> program_;  // made at first use
};

}  // namespace flash_attention::check
