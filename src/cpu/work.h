#pragma once

#include "flash_attention/plan.h"

namespace flash_attention::cpu {

/// The work of a call, in multiplications of a product at its peak: a million take about 25 us on a core with AVX-512.
double multiplications(const Problem& problem, Pass pass);

}  // namespace flash_attention::cpu
