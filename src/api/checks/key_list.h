#pragma once

#include "flash_attention/problem.h"

namespace flash_attention::api {

/// Refuses lists of keys that are none, and what lists are not combined with; sets what a call without lists does not say.
void check_key_list(Problem& problem, Pass pass);

}  // namespace flash_attention::api
