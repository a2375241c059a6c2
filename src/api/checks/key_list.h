#pragma once

#include "flash_attention/problem.h"

namespace flash_attention::api {

/// Refuses malformed lists of keys, and options that cannot be combined with lists. Without lists, resets the fields
/// that belong to them.
void check_key_list(Problem& problem, Pass pass);

}  // namespace flash_attention::api
