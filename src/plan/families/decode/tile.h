#pragma once

#include <optional>

#include "abi/config.h"
#include "plan/request.h"

// The tiles of decode/sm80 and decode/sm90.

namespace flash_attention::plan {

/// A tile with as many rows as there are, or as fit; none if shared memory is too small. producer_warp: TMA loads the
/// keys.
std::optional<abi::ForwardConfig> choose_decode_tile(const Request& request, bool producer_warp);

}  // namespace flash_attention::plan
