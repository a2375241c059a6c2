#pragma once

#include <cstdint>

namespace flash_attention {

/// The type of a tensor's elements. Those from float8 on are only for K and V. float8 is also for Q, if K and V have the
/// same type. An element of the last three is a byte with two codes of 4 bits (docs/numerics.md, "4-bit caches").
enum class Dtype : std::uint8_t { float32, float16, bfloat16, float8_e4m3, float8_e5m2, int8, nvfp4, mxfp4, int4 };

/// Codes of 4 bits, whose scales are those of groups of columns.
constexpr bool has_groups(Dtype dtype) { return dtype >= Dtype::nvfp4; }

/// Columns that share a scale; `given`: Problem::kv_group, 0 = the format's.
constexpr std::int64_t columns_of_group(Dtype dtype, std::int64_t given) {
  return given != 0 ? given : dtype == Dtype::nvfp4 ? 16 : 32;
}

/// Elements of a row that has so many columns.
constexpr std::int64_t stored_columns(Dtype dtype, std::int64_t columns) {
  return has_groups(dtype) ? columns / 2 : columns;
}

}  // namespace flash_attention
