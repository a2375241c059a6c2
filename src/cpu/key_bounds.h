#pragma once

#include "cpu/call.h"

namespace flash_attention::cpu {

/// Fills the call's part of the workspace with what the hidden rows of every 64 keys have in common.
void find_key_bounds(const Call& call);

}  // namespace flash_attention::cpu
