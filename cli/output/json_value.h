#pragma once

#include "support/json_value.h"

namespace flash_attention::cli {

using support::JsonValue;

}  // namespace flash_attention::cli
