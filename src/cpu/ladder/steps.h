#pragma once

#include "cpu/call.h"

namespace flash_attention::cpu {

// The teaching ladder's first two steps, as kernels of one item. The other steps are in each instruction set's table.
extern const Step scalar_step[2];
extern const Step blocked_step[2];

}  // namespace flash_attention::cpu
