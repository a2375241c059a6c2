#pragma once

#include <optional>

#include "abi/config.h"
#include "flash_attention/plan.h"

// The tiles of decode/sm80 and decode/sm90.

namespace flash_attention::plan {

/// With as many rows as there are, or as few as fit; none where shared memory is too small. producer_warp: keys come by
/// TMA.
std::optional<abi::ForwardConfig> choose_decode_tile(const Problem& problem, const DeviceInfo& device,
                                                     bool producer_warp = false);

}  // namespace flash_attention::plan
