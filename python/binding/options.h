#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "api/option_table.h"

namespace flash_attention::python {

namespace option_kind {
using integer = std::int64_t;
using number = float;
using optional_number = std::optional<float>;
using flag = bool;
using optional_flag = std::optional<bool>;
using text = std::string;
}  // namespace option_kind

/// The arguments of a call that are not tensors.
struct CallOptions {
#define FLASH_ATTENTION_MEMBER(kind, name, default_value, ...) option_kind::kind name = default_value;
  FLASH_ATTENTION_CALL_OPTIONS(FLASH_ATTENTION_MEMBER)
#undef FLASH_ATTENTION_MEMBER

  bool operator==(const CallOptions&) const = default;
};

}  // namespace flash_attention::python
