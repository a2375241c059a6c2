#pragma once

#include <cstdint>
#include <limits>

#include "fuzz/generator/factors.h"
#include "support/oracle/case.h"

namespace flash_attention::fuzz {

/// How large problems get.
struct Sizes {
  std::int64_t longest = 330;  // sequence of the level "long"
  double max_products = 3e7;   // of two elements in Q K^T: long sequences of many heads are cut down to it
  // Kernels do rows with NaN again, score by score: the emulator takes ten times as long over them.
  double max_nan_products = std::numeric_limits<double>::infinity();
};

/// A problem with the row's levels. What a level leaves open (which prime, which lengths, which values) is drawn from the
/// seeds; `configuration_seed` serves what a kernel is compiled for, so that rows of one configuration share it.
testing::Case draw_case(const Row& row, std::uint64_t configuration_seed, std::uint64_t seed, const Sizes& sizes = {});

}  // namespace flash_attention::fuzz
