#pragma once

#include "flash_attention/attention.h"

namespace flash_attention::api {

/// A score that is a soft cap or ALiBi becomes that option, where it is the same for this problem; its window was taken
/// before.
void take_options_of_program(Problem& p);

/// The program's tensor that became ALiBi's slopes, -1 if none did.
int slopes_of_program(const Problem& given, const Problem& normalised);

/// The call's pointers with the slopes from that tensor. Refuses what the program would have refused, and slopes beside it.
Buffers with_slopes(const Problem& normalised, const Buffers& buffers, int tensor);

}  // namespace flash_attention::api
