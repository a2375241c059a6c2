#pragma once

#include "flash_attention/plan.h"

namespace flash_attention::cpu {

/// How much work a call is, in multiplications of a product at its peak: a million are about 25 us of a core with AVX-512.
double multiplications(const Problem& problem, Pass pass);

}  // namespace flash_attention::cpu
