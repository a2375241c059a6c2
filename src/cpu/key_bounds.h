#pragma once

#include "cpu/call.h"

namespace flash_attention::cpu {

/// Fills in the call's part of the workspace: the common bounds of the hidden rows of every 64 keys.
void find_key_bounds(const Call& call);

}  // namespace flash_attention::cpu
