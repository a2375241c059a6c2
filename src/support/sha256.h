#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace flash_attention::support {

using Sha256 = std::array<std::uint8_t, 32>;

/// FIPS 180-4.
Sha256 sha256(std::string_view bytes);

/// Lower-case hexadecimal digits.
std::string to_hex(std::span<const std::uint8_t> bytes);

}  // namespace flash_attention::support
