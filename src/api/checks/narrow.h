#pragma once

#include "api/checks/sizes.h"
#include "flash_attention/problem.h"

namespace flash_attention::api {

/// Checks K and V in 8 and 4 bits, and their scales.
void check_narrow_keys(Problem& p, Pass pass, const RowAxes& of_kv);

/// Checks Q in 8 bits, and its scales: K and V must have the same type. Called after check_narrow_keys.
void check_narrow_queries(Problem& p, Pass pass);

}  // namespace flash_attention::api
