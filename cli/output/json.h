#pragma once

#include "support/json.h"

namespace flash_attention::cli {

using support::Json;

}  // namespace flash_attention::cli
