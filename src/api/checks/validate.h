#pragma once

#include "flash_attention/attention.h"

namespace flash_attention::api {

/// Refuses a problem that breaks the contract and fills in every default: strides, scale, head_dim_v, longest lengths;
/// causal becomes window_right = 0, and a window that hides nothing is dropped. Planner and kernels see only such problems.
Problem normalise(const Problem& problem, Pass pass);

/// Refuses pointers, lengths or a workspace that do not fit the (normalised) problem and its plan. Reads lengths only
/// where they are in host memory.
void validate(const Problem& problem, const Plan& plan, const Buffers& buffers, const Options& options);

/// The same before its masks are prepared, in `bytes` of memory: what hides keys must be there.
void validate_preparation(const Problem& problem, const Plan& plan, const Buffers& buffers, const void* memory,
                          std::size_t bytes, const Options& options);

}  // namespace flash_attention::api
