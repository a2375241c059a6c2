#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "program/program.h"

namespace flash_attention::program {

/// of_i * i + of_j * j + constant.
struct Linear {
  std::int64_t of_i, of_j, constant;
};

using Linears = std::vector<std::optional<Linear>>;

/// The form of each node that is such an int, with factors of -1, 0 or 1.
Linears linears_of(const std::vector<Node>& nodes);

}  // namespace flash_attention::program
