#pragma once

#include <utility>

#include "kernels/emulated.h"

namespace flash_attention::testing {

/// The cases with float32 products.
inline std::vector<Case> ieee(std::vector<Case> cases) {
  for (Case& c : cases) c.problem.precision = Precision::ieee;
  return cases;
}

/// Widths of which some warps have no columns, and that are no multiple of 64; keys and values of different widths.
inline std::vector<Case> fp32_widths() {
  std::vector<Case> cases;
  constexpr std::pair<std::int64_t, std::int64_t> widths[] = {{8, 8}, {32, 32}, {40, 72}, {96, 24}, {136, 80}, {192, 128}};
  for (const auto& [dim, dim_v] : widths) {
    Case c = base(("widths_" + std::to_string(dim) + "_" + std::to_string(dim_v)).c_str(), Dtype::float32);
    c.problem.head_dim = dim, c.problem.head_dim_v = dim_v;
    c.problem.batch = 1, c.problem.heads_q = 2, c.problem.heads_kv = 1, c.problem.seq_q = 70, c.problem.seq_kv = 131;
    c.problem.causal = dim == 40;
    cases.push_back(c);
  }
  return ieee(cases);
}

inline Target fp32_target(DeviceKind kind, const char* kernel, Pass pass) {
  return {.device = {.kind = kind, .emulated_arch = 80}, .kernel = kernel, .pass = pass};
}

}  // namespace flash_attention::testing
