#pragma once

#include <cstdint>
#include <vector>

#include "fuzz/generator/factors.h"

namespace flash_attention::fuzz {

/// Rows in which every pair of levels occurs that the domain has and that go together: a covering array of strength two,
/// built greedily, the same for the same seed. Runs of `share` rows agree in what a kernel is compiled for. A pair counts
/// only where it can show something: not in a row with a blank level (sight.h), unless that is one of the two.
std::vector<Row> cover(const Domain& domain, int share, std::uint64_t seed);

}  // namespace flash_attention::fuzz
