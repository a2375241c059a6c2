#pragma once

#include <vector>

#include "abi/append.h"
#include "flash_attention/append.h"
#include "flash_attention/plan.h"

namespace flash_attention::plan {

/// The largest head_dim and head_dim_v.
constexpr int append_head_dim = 1024;

/// The number of tokens, packed or not.
inline std::int64_t new_tokens(const AppendProblem& p) {
  return p.packed_new || p.placed ? p.total_new : p.batch * p.seq_new;
}
inline std::int64_t query_tokens(const AppendProblem& p) { return p.packed_q || p.placed ? p.total_q : p.batch * p.seq_q; }

/// The launch of decode/append for a normalised problem; a grid of 0 blocks if there is nothing to do.
Launch lay_out_append(const AppendProblem& problem);

/// Heads of a token that a warp of decode/append takes.
int heads_of_append_task(const AppendProblem& problem);

/// The number of blocks of decode/append_gradient. Each sums its part of the weights' gradients.
int append_gradient_blocks(const AppendProblem& problem);

/// The launches of append_backward: the gradients of rows with a sum for each block; and if a weight has a gradient,
/// the total of these sums.
std::vector<Launch> lay_out_append_gradients(const AppendProblem& problem, bool weights);

}  // namespace flash_attention::plan
