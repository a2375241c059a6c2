#pragma once

#include <string>

#include "flash_attention/problem.h"
#include "support/json.h"
#include "support/json_value.h"

namespace flash_attention::tuning {

/// The fields of a problem that differ from their defaults.
support::Json to_json(const Problem& problem);

/// The inverse. Throws Error(invalid_argument) for an unknown field or a wrong value. `name` is the name of the text.
Problem problem_of(const support::JsonValue& json, const std::string& name);

/// Throws Error(invalid_argument) about the text with that name.
[[noreturn]] void refuse(const std::string& name, const std::string& what);

/// "forward" or "backward". Throws for any other text.
Pass pass_of(const std::string& text, const std::string& name);

}  // namespace flash_attention::tuning
