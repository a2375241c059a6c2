#pragma once

#include "flash_attention/attention.h"

namespace flash_attention::api {

/// Replaces a score that is a soft cap or ALiBi by that option, if it has the same effect for this problem. Its window
/// has been replaced before.
void take_options_of_program(Problem& p);

/// The program's tensor that became ALiBi's slopes, or -1.
int slopes_of_program(const Problem& given, const Problem& normalised);

/// The call's pointers, with the slopes from that tensor. Refuses what the program would have refused, and slopes in
/// addition.
Buffers with_slopes(const Problem& normalised, const Buffers& buffers, int tensor);

}  // namespace flash_attention::api
