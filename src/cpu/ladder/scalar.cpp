// The steps without vectors, compiled like any other file: for the simplest CPU of the architecture.

#include "cpu/ladder/c0_scalar.h"
#include "cpu/ladder/c1_blocked.h"
#include "cpu/ladder/steps.h"

namespace flash_attention::cpu {

const Step scalar_step[2] = {{c0_scalar::items, c0_scalar::attention}, {}};
const Step blocked_step[2] = {{c1_blocked::items, c1_blocked::attention}, {}};

}  // namespace flash_attention::cpu
