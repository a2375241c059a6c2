#pragma once

#include "abi/append.h"
#include "flash_attention/append.h"
#include "flash_attention/plan.h"

namespace flash_attention::plan {

/// The largest head_dim and head_dim_v.
constexpr int append_head_dim = 1024;

/// Tokens, packed or not.
inline std::int64_t new_tokens(const AppendProblem& p) {
  return p.packed_new || p.placed ? p.total_new : p.batch * p.seq_new;
}
inline std::int64_t query_tokens(const AppendProblem& p) { return p.packed_q || p.placed ? p.total_q : p.batch * p.seq_q; }

/// The launch of decode/append for a normalised problem; a grid of 0 blocks if there is nothing to do.
Launch lay_out_append(const AppendProblem& problem);

}  // namespace flash_attention::plan
