#pragma once

#include <vector>

#include "program/program.h"

namespace flash_attention::program {

/// Where remainders of an index go round: at the multiples of periods, each the product of the constants that are returned
/// for it. `mod (floordiv i s0) 8` has the period 8 s0 in i. Remainders of sums are not looked at.
std::vector<std::vector<Node>> periods(const std::vector<Node>& nodes, Op index);

}  // namespace flash_attention::program
