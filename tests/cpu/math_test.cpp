// exp2 and tanh of every instruction set that this machine has: over every 17th float and all of those around the limits,
// in the long tail over all floats. docs/numerics.md states the bounds.

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "cpu/backend.h"
#include "cpu/call.h"
#include "cpu/detect.h"
#include "support/long_tail.h"

namespace flash_attention::cpu {
namespace {

constexpr std::uint64_t block = 1 << 16;

/// Calls check(x, f(x)) for every float whose bits are a multiple of `step`.
template <class Check>
void for_all_floats(void (*function)(const float*, float*, std::int64_t), std::uint64_t step, Check check) {
  std::vector<float> from(block), to(block);
  for (std::uint64_t first = 0; first < std::uint64_t{1} << 32; first += block * step) {
    for (std::uint64_t i = 0; i < block; ++i) from[i] = std::bit_cast<float>(static_cast<std::uint32_t>(first + i * step));
    function(from.data(), to.data(), block);
    for (std::uint64_t i = 0; i < block; ++i) check(from[i], to[i]);
  }
}

/// The same for the floats next to `limit`, half a block of them on each side.
template <class Check>
void for_floats_around(void (*function)(const float*, float*, std::int64_t), float limit, Check check) {
  std::vector<float> from(block), to(block);
  const std::uint32_t first = std::bit_cast<std::uint32_t>(limit) - static_cast<std::uint32_t>(block / 2);
  for (std::uint32_t i = 0; i < block; ++i) from[i] = std::bit_cast<float>(first + i);
  function(from.data(), to.data(), block);
  for (std::uint64_t i = 0; i < block; ++i) check(from[i], to[i]);
}

/// The distance in units of the last place of the exact value, which is a normal float: 2^-23 of its power of two.
double ulps(float got, double exact) {
  const double power = std::bit_cast<double>(std::bit_cast<std::uint64_t>(exact) & 0x7ff0'0000'0000'0000u);
  return std::fabs(got - exact) / (power * 0x1p-23);
}

class CpuMath : public ::testing::TestWithParam<CpuIsa> {
 protected:
  void SetUp() override {
    if (!has_isa(GetParam())) GTEST_SKIP() << "this CPU has no " << to_string(GetParam());
  }
};

TEST_P(CpuMath, Exp2IsWithinItsBoundOverAllFloats) {
  double worst = 0;
  std::int64_t wrong = 0;
  const auto check = [&](float x, float got) {
    if (std::isnan(x)) {
      wrong += !std::isnan(got);
    } else if (x < -126) {
      wrong += got != 0;  // flushed
    } else if (x >= 128) {
      wrong += got != INFINITY;
    } else if (std::fabs(x) < 0x1p-26f) {
      wrong += got != 1;
    } else {
      worst = std::max(worst, ulps(got, std::exp2(static_cast<double>(x))));
    }
  };
  for_all_floats(kernel_table(GetParam()).exp2, testing::with_long_tail() ? 1 : 17, check);
  for (const float limit : {-126.0f, 128.0f, 0x1p-26f, -0x1p-26f, -0x1p-23f, 1.0f, -1.0f}) {
    for_floats_around(kernel_table(GetParam()).exp2, limit, check);
  }
  EXPECT_EQ(wrong, 0);
  EXPECT_LT(worst, 2.4) << to_string(GetParam());
  RecordProperty("worst_ulps", std::to_string(worst));
}

TEST_P(CpuMath, TanhIsWithinItsBound) {
  double worst = 0;
  int wrong = 0;
  for_all_floats(kernel_table(GetParam()).tanh, 127, [&](float x, float got) {
    if (std::isnan(x)) {
      wrong += !std::isnan(got);
    } else {
      worst = std::max(worst, std::fabs(got - std::tanh(static_cast<double>(x))));
      wrong += std::fabs(x) < 1e-3f && std::fabs(got - std::tanh(static_cast<double>(x))) > 1.5e-7 * std::fabs(x);
    }
  });
  EXPECT_EQ(wrong, 0);
  EXPECT_LT(worst, 1.5e-7) << to_string(GetParam());
  RecordProperty("worst_error", std::to_string(worst));
}

INSTANTIATE_TEST_SUITE_P(Isa, CpuMath, ::testing::Values(CpuIsa::generic, CpuIsa::neon, CpuIsa::avx2, CpuIsa::avx512),
                         [](const auto& isa) { return std::string(to_string(isa.param)); });

}  // namespace
}  // namespace flash_attention::cpu
