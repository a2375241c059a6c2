#pragma once

#include <vector>

#include "flash_attention/problem.h"

namespace flash_attention::cli {

/// A call that `compile --common` prepares.
struct CommonCall {
  Problem problem;
  Pass pass;
};

/// What most models ask for: training and inference, the usual widths, full and causal, packed, and decoding from a cache.
/// A kernel's configuration follows from sizes too, so the sizes are those at which it changes; the same kernel is compiled
/// once.
std::vector<CommonCall> common_calls();

}  // namespace flash_attention::cli
