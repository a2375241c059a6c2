#pragma once

#include <cstdint>
#include <vector>

#include "program/program.h"

namespace flash_attention::program {

/// How often a value of a program is computed on a GPU: once for a head, for each of its rows or keys, or for every score.
enum class Stage : std::uint8_t { head, row, key, pair };

std::vector<Stage> stages_of(const std::vector<Node>& nodes);

/// The values of `nodes`, in which float(x) of an int x that is made of i, j and numbers by sums, differences and abs is
/// made of floats: no conversion for each score. Exact, since indices are below `longest`: nothing changes where a float
/// could not hold such an x. Roots become their new numbers.
std::vector<Node> in_floats(const std::vector<Node>& nodes, std::int64_t longest, std::vector<int>& roots);

/// A magnitude that a float does not exceed, whatever the score and the tensors are, but for NaN; infinity: unknown.
float largest_magnitude(const std::vector<Node>& nodes, int node);

}  // namespace flash_attention::program
