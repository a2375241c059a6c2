#pragma once

#include "flash_attention/problem.h"

namespace flash_attention::api {

/// Refuses malformed lists of keys and options that lists are not combined with; sets the fields that a call without
/// lists leaves out.
void check_key_list(Problem& problem, Pass pass);

}  // namespace flash_attention::api
