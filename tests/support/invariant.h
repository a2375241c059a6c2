#pragma once

// One set of sequences asked in many ways: the bits of a row must not depend on the way. docs/numerics.md, "Invariant
// bits".

#include <cstdint>
#include <string>
#include <vector>

#include "flash_attention/attention.h"

namespace flash_attention::testing {

/// How some rows are asked for. Sequence s has keys that depend on s, head, position and column alone.
struct Asked {
  struct Part {
    int sequence;
    std::int64_t keys;     // that exist; the last query is at the last of them
    std::int64_t queries;  // the last ones
  };
  std::string name;
  std::vector<Part> parts;
  std::int64_t capacity = 0;   // keys of the tensor; 0 = of the longest part
  std::int64_t page_size = 0;  // 0 = no pages
  bool packed = false;         // queries end to end, and keys where there are no pages
  int num_sms = 0;             // of the emulator
  int arch = 90;
  std::string kernel{};  // empty: the planner's choice
};

/// The options that all ways share: head counts and dimensions, dtype, causal, windows, softcap, sink, ...
Problem invariant_problem(Dtype dtype);

/// Bits of (out, lse) of every row, by "sequence/position/head": head_dim_v words, then that of lse.
using RowBits = std::vector<std::pair<std::string, std::vector<std::uint32_t>>>;
RowBits rows_of(const Problem& options, const Asked& asked, Device device);

/// Ways to ask for the last rows of sequence 0, of `keys` keys. An architecture has bits of its own: on sm_90 prefill and
/// decoding are different kernels.
std::vector<Asked> ways_to_ask(std::int64_t keys);

/// Asks in all ways, and fails where a row differs from the first way that had it.
void expect_invariant(const Problem& options, std::int64_t keys, Device device);

}  // namespace flash_attention::testing
