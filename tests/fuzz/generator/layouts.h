#pragma once

#include <cstdint>
#include <string_view>

#include "flash_attention/problem.h"

namespace flash_attention::fuzz {

/// Strides of q, k, v, out and their gradients, by the name of a level: dense, heads_first, gaps, odd, fours, broadcast,
/// reversed. Broadcast: K and V are the same for the whole batch, or for all heads where sequences are packed or in pages.
void lay_out(Problem& problem, std::string_view level);

/// Strides of a tensor over the scores that has the named axes (letters of "bhq"); `gap` elements behind each row.
ScoreTensor score_tensor(const Problem& problem, std::string_view axes, std::int64_t gap);

}  // namespace flash_attention::fuzz
