#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "flash_attention/dtype.h"
#include "support/narrow.h"

// Codes of 4 bits, two in a byte, and the scales of groups of them (docs/numerics.md, "4-bit caches").

namespace flash_attention::support {

/// The number of a code: of e2m1, or 0 to 15 of int4.
inline float float_of_code(Dtype dtype, unsigned code) {
  constexpr float e2m1[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  if (dtype == Dtype::int4) return static_cast<float>(code & 15u);
  return (code & 8u) != 0 ? -e2m1[code & 7u] : e2m1[code & 7u];
}

/// The code of column `column` of a row.
inline unsigned code_at(const std::uint8_t* row, std::int64_t column) {
  return static_cast<unsigned>(row[column / 2]) >> column % 2 * 4 & 15u;
}

/// To nearest even, clipped to 6.
inline unsigned e2m1_of_float(float value) {
  const float m = std::fabs(value);
  const int magnitude = (m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) + (m >= 3.5f) + (m > 5.0f);
  return static_cast<unsigned>(magnitude) | sign_of(value) << 3;
}

/// 2^(exponent - 127); 255 is NaN.
inline float float_of_e8m0(unsigned exponent) {
  if (exponent == 255) return std::numeric_limits<float>::quiet_NaN();
  return std::bit_cast<float>(exponent == 0 ? 0x00400000u : exponent << 23);
}

/// The bytes of e8m0 that count: float16 holds 2^-24 to 2^15.
constexpr int least_e8m0(Dtype dtype) { return dtype == Dtype::float16 ? 103 : 0; }
constexpr int largest_e8m0(Dtype dtype) { return dtype == Dtype::float16 ? 142 : 254; }

/// A number of 16 or 32 bits.
inline float float_of(Dtype dtype, const void* numbers, std::int64_t i) {
  if (dtype == Dtype::float32) return static_cast<const float*>(numbers)[i];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(numbers)[i];
  return dtype == Dtype::float16 ? float_of_fp16(bits) : float_of_bf16(bits);
}
inline void store_float(Dtype dtype, void* numbers, std::int64_t i, float value) {
  if (dtype == Dtype::float32) {
    static_cast<float*>(numbers)[i] = value;
  } else {
    static_cast<std::uint16_t*>(numbers)[i] = dtype == Dtype::float16 ? fp16_of_float(value) : bf16_of_float(value);
  }
}
inline float rounded_to(Dtype dtype, float value) {
  if (dtype == Dtype::float32) return value;
  return dtype == Dtype::float16 ? float_of_fp16(fp16_of_float(value)) : float_of_bf16(bf16_of_float(value));
}

/// Writes codes, scale and zero of `count` columns, with k_scale or v_scale in tensor_scale.
inline void quantise_group(Dtype codes, Dtype dtype, const float* x, std::int64_t count, float tensor_scale,
                           std::uint8_t* to, void* scales, void* zeros, std::int64_t group) {
  const bool nan = std::any_of(x, x + count, [](float value) { return std::isnan(value); });
  float low = x[0], high = x[0];
  for (std::int64_t c = 1; c < count; ++c) low = std::fmin(low, x[c]), high = std::fmax(high, x[c]);
  const auto store = [&](auto code_of) {
    for (std::int64_t c = 0; c < count; c += 2)
      to[c / 2] = nan ? 0 : static_cast<std::uint8_t>(code_of(x[c]) | code_of(x[c + 1]) << 4);
  };
  const float largest = std::fmax(std::fabs(low), std::fabs(high));
  if (codes == Dtype::nvfp4) {
    const std::uint8_t scale = e4m3_of_float(std::fmax(largest / (6 * tensor_scale), 0x1p-9f));
    static_cast<std::uint8_t*>(scales)[group] = nan ? 0x7f : scale;
    const float factor = 1 / (float_of_e4m3(scale) * tensor_scale);
    return store([=](float value) { return e2m1_of_float(value * factor); });
  }
  if (codes == Dtype::mxfp4) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(largest);  // 6 * 2^e is 1.5 * 2^(e + 2)
    const int wanted = static_cast<int>(bits >> 23 & 0xffu) - 2 + ((bits & 0x7fffffu) > 0x400000u ? 1 : 0);
    const int exponent = std::clamp(wanted, std::max(27, least_e8m0(dtype)), largest_e8m0(dtype));
    static_cast<std::uint8_t*>(scales)[group] = nan ? 255 : static_cast<std::uint8_t>(exponent);
    const float factor = float_of_e8m0(static_cast<unsigned>(254 - exponent));
    return store([=](float value) { return e2m1_of_float(value * factor); });
  }
  const float finite = dtype == Dtype::float16    ? 65504.0f
                       : dtype == Dtype::bfloat16 ? 0x1.fep127f
                                                  : std::numeric_limits<float>::max();
  const auto clipped = [=](float value) { return std::fmin(std::fmax(value, -finite), finite); };
  const float from = rounded_to(dtype, clipped(low));
  const float step = rounded_to(dtype, clipped(high) / 15 - from / 15), factor = step > 0 ? 1 / step : 0;
  store_float(dtype, scales, group, step);
  store_float(dtype, zeros, group, nan ? std::numeric_limits<float>::quiet_NaN() : from);
  store([=](float value) {
    const float code = (clipped(value) - from) * factor;
    return static_cast<unsigned>(std::nearbyint(code > 0 ? (code < 15 ? code : 15.0f) : 0.0f));
  });
}

}  // namespace flash_attention::support
