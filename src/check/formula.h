#pragma once

#include <cstdint>

#include "flash_attention/problem.h"

namespace flash_attention::check {

// docs/numerics.md in fp64, one function for each of its rules: the library's only definition of a correct result. The
// check of calls and the tests' oracle use these functions; no backend does.

/// The part of one sequence that counts.
struct Extent {
  std::int64_t len_q = 0, len_kv = 0;                // the diagonal follows these
  std::int64_t first_key = 0, end_key = 0;           // keys before and from there on are hidden
  std::int64_t window_left = -1, window_right = -1;  // the sequence's own; negative: none
};

/// Whether query i sees key j by lengths, window and chunks; masks and programs hide more.
bool visible(const Problem& problem, const Extent& extent, std::int64_t i, std::int64_t j);

/// A score under a soft cap and its derivative, from tanh. A yardstick in lower precision rounds that tanh first.
struct Capped {
  double value = 0, slope = 1;
};
double tanh_of(float softcap, double score);
Capped capped(float softcap, double tanh);

/// Whether the bounds of a key (HiddenRows) hide it from query i.
bool hidden_by(const std::int32_t* bounds, int count, std::int64_t i);

/// A sequence's part of a bit mask: `bytes` from `first` on, or no mask.
struct Bits {
  bool present = false;
  const std::uint8_t* first = nullptr;
  std::int64_t bytes = 0;
};
/// Whether a bit mask shows key j to query i.
bool shown_by(const BitMask& mask, const Bits& bits, const Extent& extent, std::int64_t i, std::int64_t j);

/// How often a list of keys names key j of its sequence. A list of blocks is a set: at most once.
std::int64_t listed(const KeyList& list, const std::int32_t* entries, std::int64_t count, std::int64_t j);

/// A finite bias stays finite: its size counts as at most 2.3e38.
double bounded_bias(double bias);

/// ALiBi's penalty on a score.
double alibi_penalty(double slope, const Extent& extent, std::int64_t i, std::int64_t j);

/// Whether dropout keeps a score: the published function, written independently of the backends.
bool keeps(const Problem& problem, std::uint64_t seed, std::uint64_t offset, std::int64_t b, std::int64_t head,
           std::int64_t i, std::int64_t j);
/// Dropout's factor of a probability.
double kept_factor(const Problem& problem, std::uint64_t seed, std::uint64_t offset, std::int64_t b, std::int64_t head,
                   std::int64_t i, std::int64_t j);

/// Rows with a lower lse have no gradients.
constexpr double lowest_lse = -1e7;

}  // namespace flash_attention::check
