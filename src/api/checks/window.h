#pragma once

#include "flash_attention/problem.h"

namespace flash_attention::api {

/// One form for each window: alignment, causal and a chunk as far as they hide a key of this problem.
void choose_window(Problem& p);

/// Bounds on i - j in a mask program become those of the window, where that has the diagonal j = i, too.
void take_window_of_program(Problem& p);

}  // namespace flash_attention::api
