#pragma once

#include "flash_attention/attention.h"

namespace flash_attention::api {

/// Refuses a bit mask and windows of sequences that a problem cannot have. Those without effect become the default.
void check_bit_mask(Problem& problem, Pass pass);

/// Refuses decreasing offsets of a bit mask, if the host can read them.
void check_bit_mask_offsets(const Problem& problem, const Buffers& buffers);

}  // namespace flash_attention::api
