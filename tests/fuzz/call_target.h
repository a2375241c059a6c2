#pragma once

#include <cstddef>
#include <cstdint>

namespace flash_attention::fuzz {

/// What became of one input.
enum class Outcome { refused, planned, ran };

/// Turns bytes into a problem, a device and a call, and makes it: validation and planning for any sizes, a run where the
/// problem is small. The library may refuse with Error; anything else (a crash, another exception, a result that breaks the
/// contract) ends the process through a failed check.
Outcome call_with(const std::uint8_t* data, std::size_t size);

}  // namespace flash_attention::fuzz
