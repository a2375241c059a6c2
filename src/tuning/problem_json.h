#pragma once

#include <string>

#include "flash_attention/problem.h"
#include "support/json.h"
#include "support/json_value.h"

namespace flash_attention::tuning {

/// The fields of a problem that are not as they are by default.
support::Json to_json(const Problem& problem);

/// The inverse. Throws Error(invalid_argument) for a field that is none or has a wrong value; `name` says what was read.
Problem problem_of(const support::JsonValue& json, const std::string& name);

/// Throws Error(invalid_argument) about what has that name.
[[noreturn]] void refuse(const std::string& name, const std::string& what);

/// "forward" or "backward"; throws for another.
Pass pass_of(const std::string& text, const std::string& name);

}  // namespace flash_attention::tuning
