#pragma once

#include "support/oracle/attempt.h"

namespace flash_attention::testing {

/// Every code of 4 bits with every scale of its group, NaN among them: 256 sequences of one key. So out
/// is the value, and lse the number of one column of the key: query head h asks for column h, which has the code h.
void check_all_codes(Dtype codes, Dtype dtype, const Target& target);

}  // namespace flash_attention::testing
