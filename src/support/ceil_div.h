#pragma once

#include <cstdint>

namespace flash_attention {

constexpr std::int64_t ceil_div(std::int64_t value, std::int64_t unit) { return (value + unit - 1) / unit; }

}  // namespace flash_attention
