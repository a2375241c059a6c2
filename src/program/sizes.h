#pragma once

#include <cstdint>

#include "flash_attention/problem.h"
#include "program/program.h"

namespace flash_attention::program {

/// Elements of captured tensor n.
std::int64_t num_elements(const Problem& problem, const Program& program, int n);

/// Where the sums of the gradients are in a part of the workspace: one float a tensor for the largest term, then the sums,
/// int64 each.
struct GradientLayout {
  std::int64_t offsets[max_tensors] = {};  // bytes; -1: no gradient
  std::int64_t bytes = 0;                  // of all; 0: no gradient is wanted
};
GradientLayout gradient_layout(const Problem& problem, const Program& program);

}  // namespace flash_attention::program
