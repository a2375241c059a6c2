#pragma once

#include "flash_attention/attention.h"

// The options that hide keys by position, by bits and by lists: one form for each, and what cannot be combined.

namespace flash_attention::api {

/// One form for each window: alignment, causal and a chunk as far as they hide a key of this problem.
void choose_window(Problem& p);

/// Bounds on i - j in a mask program become those of the window, if that has the diagonal j = i, too.
void take_window_of_program(Problem& p);

/// Refuses a bit mask and windows of sequences that a problem cannot have. Those without effect become the default.
void check_bit_mask(Problem& p, Pass pass);

/// Refuses decreasing offsets of a bit mask, if the host can read them.
void check_bit_mask_offsets(const Problem& p, const Buffers& buffers);

/// Refuses malformed lists of keys, and options that cannot be combined with lists. Without lists, resets the fields
/// that belong to them.
void check_key_list(Problem& p, Pass pass);

}  // namespace flash_attention::api
