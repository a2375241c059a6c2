#pragma once

#include <cstdint>
#include <string>

#include "flash_attention/error.h"

namespace flash_attention::api {

/// Throws a refusal: the argument, its value, and what is allowed. Braces mark the names of other arguments.
[[noreturn]] inline void refuse(const std::string& argument, const std::string& got, const std::string& allowed) {
  throw Error(ErrorCode::invalid_argument, argument, "got " + got + "; " + allowed);
}

inline void require(bool good, const char* argument, std::int64_t got, const char* allowed) {
  if (!good) refuse(argument, std::to_string(got), allowed);
}

inline void require(bool good, const char* argument, double got, const char* allowed) {
  if (!good) refuse(argument, std::to_string(got), allowed);
}

}  // namespace flash_attention::api
