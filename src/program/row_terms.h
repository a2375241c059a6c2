#pragma once

#include <vector>

#include "program/program.h"

namespace flash_attention::program {

/// A mask is a conjunction of terms: each the conjunction of some values that need the same of a row.
struct RowTerm {
  std::vector<int> roots;
  std::vector<int> row_values;  // what the pairs of a row take from it: values of the row's stage, `i` among them
};

constexpr std::size_t max_terms = 4;

/// The terms of a boolean value. Where there would be more of them, the last has what is left.
std::vector<RowTerm> row_terms(const std::vector<Node>& nodes, int root);

}  // namespace flash_attention::program
