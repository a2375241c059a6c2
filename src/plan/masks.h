#pragma once

#include "flash_attention/plan.h"

namespace flash_attention::plan {

/// What every kernel wants to know of a mask before it begins: a part of the workspace (abi/key_bounds.h).
void prepare_masks(const Problem& problem, Plan& plan);

}  // namespace flash_attention::plan
