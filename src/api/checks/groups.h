#pragma once

#include <cstdint>

#include "flash_attention/dtype.h"
#include "flash_attention/problem.h"

namespace flash_attention::api {

/// Columns that share a scale, where K and V are of 4 bits; 0 for other types. Refuses what no format has, and rows that
/// groups do not fill.
std::int64_t check_group(const char* argument, Dtype dtype, std::int64_t given, std::int64_t head_dim,
                         std::int64_t head_dim_v);

/// The scales beside those of groups: nvfp4 may have one, of the tensor.
void check_scales_of_groups(const char* argument, Dtype dtype, ScaleKind kind);

}  // namespace flash_attention::api
