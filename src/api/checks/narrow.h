#pragma once

#include <cstdint>

#include "api/checks/sizes.h"
#include "flash_attention/problem.h"

namespace flash_attention::api {

/// Checks K and V in 8 and 4 bits, and their scales.
void check_narrow_keys(Problem& p, Pass pass, const RowAxes& of_kv);

/// Checks Q in 8 bits, and its scales: K and V must have the same type. Called after check_narrow_keys.
void check_narrow_queries(Problem& p, Pass pass);

/// Columns that share a scale, if K and V have 4 bits; 0 for other types. Refuses what no format has, and rows that
/// groups do not fill.
std::int64_t check_group(const char* argument, Dtype dtype, std::int64_t given, std::int64_t head_dim,
                         std::int64_t head_dim_v);

/// Refuses further scales next to those of groups: only nvfp4 may have one, of the tensor.
void check_scales_of_groups(const char* argument, Dtype dtype, ScaleKind kind);

}  // namespace flash_attention::api
