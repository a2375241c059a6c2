#pragma once

#include <cstdint>

namespace flash_attention {

/// The type of a tensor's elements. The last three are only for K and V. float8 is also for Q, if K and V have the same
/// type.
enum class Dtype : std::uint8_t { float32, float16, bfloat16, float8_e4m3, float8_e5m2, int8 };

}  // namespace flash_attention
