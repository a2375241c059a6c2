#pragma once

#include "flash_attention/device.h"
#include "flash_attention/dtype.h"

namespace flash_attention::testing {

/// append() to a cache of 4 bits in pages, after a norm and rotation if asked: scales, zeros and codes are those of
/// docs/numerics.md in fp64, and the rest of the cache is untouched. Some groups have a NaN, an Inf or nothing but zeros.
void check_append_groups(Device device, Dtype codes, Dtype dtype, int group, bool rotates);

}  // namespace flash_attention::testing
