#pragma once

#include <string>
#include <vector>

#include "flash_attention/append.h"

namespace flash_attention::testing {

/// A call of append and what it needs besides tensors, which are drawn from the name.
struct AppendCase {
  std::string name;
  AppendProblem problem;
  std::vector<std::int32_t> lengths, rotary_offsets, cu_seqlens_new, cu_seqlens_q, sequences, positions, page_table,
      angle_positions;
  bool weights = true;        // the norms have some
  bool in_place = false;      // q_out is q
  bool without_room = false;  // some rows have no place: a GPU does not write them, the host refuses
};

/// Every kind of place, table, type and scale, in rows of every alignment.
std::vector<AppendCase> append_cases();

/// Runs it and compares queries, caches and scales with docs/numerics.md in fp64: rows that are no new ones are untouched.
void check_append(const AppendCase& c, Device device);

/// Cases with in_rows, whose gradients exist.
std::vector<AppendCase> append_gradient_cases();

/// Runs append and append_backward, the latter twice: values and gradients against fp64, the second time the same bits.
void check_append_gradients(const AppendCase& c, Device device);

}  // namespace flash_attention::testing
