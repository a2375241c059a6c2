#pragma once

#include "api/prepared.h"

namespace flash_attention::api {

/// Refuses a prepared mask that was made for another pass, kernel or size, or from other masks.
void check_prepared_mask(const Prepared& prepared, const Buffers& buffers, const PreparedMask& mask);

}  // namespace flash_attention::api
