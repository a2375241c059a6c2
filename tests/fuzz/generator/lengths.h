#pragma once

#include "fuzz/generator/dice.h"
#include "fuzz/generator/draw_case.h"

namespace flash_attention::fuzz {

/// Batch, heads and the longest sequences.
void set_sizes(testing::Case& c, const Row& row, const Sizes& sizes, Dice& dice);

/// The lengths of each sequence, and where its keys lie. One sequence of most problems has nearly all of its rows and keys,
/// whatever the options: otherwise few problems with several kinds of lengths have a row that sees a key. The others have
/// any length, often none.
void set_lengths(testing::Case& c, const Row& row, Dice& dice);

}  // namespace flash_attention::fuzz
