#pragma once

#include "api/checks/sizes.h"
#include "flash_attention/problem.h"

namespace flash_attention::api {

/// K and V in 8 bits, and their scales.
void check_narrow_keys(Problem& p, Pass pass, const RowAxes& of_kv);

/// Q in 8 bits, and its scales: with K and V of the same type. After the keys.
void check_narrow_queries(Problem& p, Pass pass);

}  // namespace flash_attention::api
