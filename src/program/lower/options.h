#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace flash_attention::program {

/// The score of a program as options: a soft cap, ALiBi, or ALiBi of a capped score.
struct OptionsOfProgram {
  float softcap = 0;      // 0: none
  int slopes = -1;        // the tensor of ALiBi's slopes, float32; -1: none
  bool by_batch = false;  // it has the axes (batch, head), not (head)
  bool absolute = false;  // the distance is |i + offset - j|; otherwise i + offset - j, which may be negative
  std::int64_t offset = 0;
  std::string rest;  // the text without the score; empty: nothing is left
};

/// Nothing if the score is something else. Options are faster than programs: no kernel is compiled for them, and scores
/// take fewer instructions.
std::optional<OptionsOfProgram> take_options(std::string_view text);

}  // namespace flash_attention::program
