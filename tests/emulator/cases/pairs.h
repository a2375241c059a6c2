#pragma once

#include "emulator/cases/values.h"
#include "emulator/wrapper_case.h"

namespace flash_attention::testing {

/// The wrappers of ptx/pairs.cuh.
inline WrapperCases pair_cases() {
  WrapperCases cases;
  const auto each_thread = [&](const char* name, const std::string& body, const std::vector<std::uint32_t>& expected,
                               int arch = 80) {
    cases.push_back({.name = name,
                     .headers = {"pairs"},
                     .body = "  ((unsigned*)output)[thread] = " + body + ";",
                     .arch = arch,
                     .shape = {.block = static_cast<int>(expected.size())},
                     .expected = bytes_of(expected)});
  };
  std::vector<std::uint32_t> moved, upper, converted, products, differences, brain_products, brain_differences;
  std::vector<std::uint32_t> remainders,
      brain_remainders;  // x (1 + a unit of the last place) - x: the product is not rounded
  for (std::uint32_t i = 0; i < 128; ++i) {
    const std::uint64_t bytes = 0xf7e6d5c4b3a29180u;
    std::uint32_t result = 0;
    for (int n = 0; n < 4; ++n)
      result |= static_cast<std::uint32_t>(bytes >> ((i * 0x1357u >> 4 * n & 7u) * 8) & 0xff) << 8 * n;
    moved.push_back(result);
    upper.push_back(i * 0x1357531u >> 16);
    std::uint32_t pair = 0;
    for (std::uint32_t n = 0; n < 2; ++n) {
      const std::uint32_t code = 2 * i + n, magnitude = code & 0x7f, exponent = magnitude >> 3, fraction = magnitude & 7;
      const double value =
          exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, static_cast<int>(exponent) - 10);
      const std::uint32_t bits =
          magnitude == 0x7f ? 0x7fff : fp16_bits(static_cast<float>(value)) | (code & 0x80) << 8;  // no NaN has a sign
      pair |= bits << 16 * n;
    }
    converted.push_back(pair);
    const auto low = static_cast<float>(small(static_cast<int>(i))), high = static_cast<float>(i) / 8;
    const auto halves = [](float a, float b) { return fp16_bits(a) | static_cast<std::uint32_t>(fp16_bits(b)) << 16; };
    const auto brains = [](float a, float b) { return bf16_bits(a) | static_cast<std::uint32_t>(bf16_bits(b)) << 16; };
    products.push_back(halves(low * 3, high * -0.5f));
    differences.push_back(halves(low - 3, high + 0.5f));
    brain_differences.push_back(brains(low - 3, high + 0.5f));
    brain_products.push_back(brains(low * 3, high * -0.5f));
    remainders.push_back(halves(low * 0x1p-10f, high * 0x1p-10f));
    brain_remainders.push_back(brains(low * 0x1p-7f, high * 0x1p-7f));
  }
  each_thread("permute_bytes", "ptx::permute_bytes(0xb3a29180u, 0xf7e6d5c4u, (unsigned)thread * 0x1357u & 0x7777u)", moved);
  each_thread("upper_half", "ptx::upper_half((unsigned)thread * 0x1357531u)", upper);
  each_thread("e4m3_to_half_pair", "ptx::e4m3_to_half_pair((unsigned short)(2 * thread | (2 * thread + 1) << 8))",
              converted, 90);
  std::vector<std::uint32_t> narrowed;  // numbers between codes, ties among them, and one beyond the largest
  const auto nearest_e4m3 = [](double value) {
    const double size = std::min(std::fabs(value), 448.0);
    const int exponent = std::max(size > 0 ? std::ilogb(size) : -6, -6);
    const int steps = static_cast<int>(std::nearbyint(std::ldexp(size, 3 - exponent)));  // 8 to 16, or less for subnormals
    return static_cast<std::uint32_t>(steps + 8 * (exponent + 6)) | (std::signbit(value) ? 0x80u : 0u);
  };
  for (int i = 0; i < 128; ++i) {
    const double low = std::ldexp(64 + i, i % 16 - 17), high = -std::ldexp(i, -11) * (i + 1);
    narrowed.push_back(nearest_e4m3(low) | nearest_e4m3(high) << 8);
  }
  narrowed[127] = 0x7fu | nearest_e4m3(-1e9) << 8;
  each_thread("to_e4m3_pair",
              "thread == 127 ? ptx::to_e4m3_pair(__builtin_bit_cast(float, 0x7fc00000), -1e9f) : "
              "ptx::to_e4m3_pair((64 + thread) * (float)(1 << thread % 16) / 131072, -(thread / 2048.0f) * (thread + 1))",
              narrowed, 90);
  // The operands are made of numbers that both types hold.
  const std::string numbers =
      "([&] { const float low = (float)((thread * 7 + thread / 5 * 3 + thread / 64) % 11 - 5), high = thread / 8.0f;"
      " return ptx::pack<Type::";
  const std::string operand_half = numbers + "float16>(low, high); }())";
  const std::string operand_brain = numbers + "bfloat16>(low, high); }())";
  each_thread("multiply_half_pairs", "ptx::multiply_half_pairs(" + operand_half + ", 0xb8004200u)", products);
  each_thread("subtract_half_pairs", "ptx::subtract_pairs<Type::float16>(" + operand_half + ", 0xb8004200u)", differences);
  each_thread("subtract_bfloat16_pairs", "ptx::subtract_pairs<Type::bfloat16>(" + operand_brain + ", 0xbf004040u)",
              brain_differences);
  each_thread("multiply_pairs_half", "ptx::multiply_pairs<Type::float16>(" + operand_half + ", 0xb8004200u)", products);
  each_thread("multiply_pairs_bfloat16", "ptx::multiply_pairs<Type::bfloat16>(" + operand_brain + ", 0xbf004040u)",
              brain_products);
  each_thread("fma_pairs_half",
              "ptx::fma_pairs<Type::float16>(" + operand_half + ", 0x3c013c01u, " + operand_half + " ^ 0x80008000u)",
              remainders);
  each_thread("fma_pairs_bfloat16",
              "ptx::fma_pairs<Type::bfloat16>(" + operand_brain + ", 0x3f813f81u, " + operand_brain + " ^ 0x80008000u)",
              brain_remainders);
  for (WrapperCase& c : cases) c.headers.push_back("convert");
  return cases;
}

}  // namespace flash_attention::testing
