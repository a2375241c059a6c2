#pragma once

#include "cpu/call.h"

namespace flash_attention::cpu {

/// Writes the rows of packed tensors that belong to no sequence (those from cu_seqlens[batch] on) as rows that see
/// nothing: out 0 and lse -inf, or gradients of 0.
void clear_tails(const Call& call, bool backward);

}  // namespace flash_attention::cpu
