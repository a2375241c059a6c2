#pragma once

#include <bit>
#include <cmath>

#include "emulator/cases/values.h"
#include "emulator/wrapper_case.h"

namespace flash_attention::testing {

/// Floats around every boundary of the 16-bit types: ties, subnormals, overflow, infinities, NaN.
inline std::vector<float> hard_floats() {
  std::vector<float> values{0.0f, -0.0f, INFINITY, -INFINITY, NAN, 65504.0f, 65519.0f, 65520.0f, 65536.0f, 3.4e38f, 1e-40f};
  for (int i = 0; i < 245; ++i) {
    const float base = std::ldexp(1.0f + static_cast<float>(i) / 64, i % 45 - 28);
    values.push_back(i % 2 == 0 ? base : -base);
    values.push_back(base * (1 + std::ldexp(1.0f, -8)));   // halfway between two bfloat16 values
    values.push_back(base * (1 + std::ldexp(1.0f, -11)));  // and between two fp16 values
    values.push_back(-base * (1 + std::ldexp(3.0f, -11)));
  }
  values.resize(960);
  return values;
}

inline WrapperCases convert_cases() {
  WrapperCases cases;
  const std::vector<float> values = hard_floats();
  const auto each_thread = [&](const char* name, const std::string& body, const Bytes& input, const Bytes& expected,
                               int block) {
    cases.push_back({.name = name,
                     .headers = {"convert"},
                     .body = body,
                     .shape = {.block = block},
                     .input = input,
                     .expected = expected});
  };
  std::vector<std::uint16_t> halves, brains, pairs_half, pairs_brain;
  std::vector<std::uint32_t> tf32;
  for (const float value : values) {
    halves.push_back(fp16_bits(value));
    brains.push_back(bf16_bits(value));
    const auto bits = std::bit_cast<std::uint32_t>(value);
    tf32.push_back(std::isfinite(value) ? (bits + 0x1000) & 0xffffe000 : 0);
  }
  const Bytes input = bytes_of(values);
  const std::string x = "((const float*)input)[thread]";
  each_thread("half_from_float", "  ((ptx::half*)output)[thread] = ptx::from_float<ptx::half>(" + x + ");", input,
              bytes_of(halves), 960);
  each_thread("bfloat16_from_float", "  ((ptx::bfloat16*)output)[thread] = ptx::from_float<ptx::bfloat16>(" + x + ");",
              input, bytes_of(brains), 960);
  each_thread(
      "tf32_from_float",
      "  const float x = " + x + ";\n  ((unsigned*)output)[thread] = x - x == 0 ? ptx::to_tf32(x) & 0xffffe000 : 0;", input,
      bytes_of(tf32), 960);
  for (const char* type : {"float16", "bfloat16"}) {
    const std::string t = std::string("<Type::") + type + ">";
    each_thread((std::string("pack_") + type).c_str(),
                "  const float* from = (const float*)input + 2 * thread;\n  ((unsigned*)output)[thread] = ptx::pack" + t +
                    "(from[0], from[1]);",
                input, bytes_of(type[0] == 'f' ? halves : brains), 480);
    std::vector<float> unpacked;
    for (int i = 0; i < 512; ++i) {
      const auto low = static_cast<std::uint16_t>(i * 60 + 3), high = static_cast<std::uint16_t>(0x8000 + i * 61);
      for (const std::uint16_t bits : {low, high})
        unpacked.push_back(type[0] == 'f' ? static_cast<float>(fp16_value(bits)) : bf16_value(bits));
    }
    each_thread((std::string("unpack_") + type).c_str(),
                "  const unsigned pair = (unsigned)(thread * 60 + 3) | (unsigned)(0x8000 + thread * 61) << 16;\n"
                "  ((float*)output)[2 * thread] = ptx::unpack_low" +
                    t +
                    "(pair);\n"
                    "  ((float*)output)[2 * thread + 1] = ptx::unpack_high" +
                    t + "(pair);",
                {}, bytes_of(unpacked), 512);
  }
  // Every fp16 value; of a NaN only that it is one.
  std::vector<float> all;
  for (int i = 0; i < 65536; ++i) {
    const auto value = static_cast<float>(fp16_value(static_cast<std::uint16_t>(i)));
    all.push_back(std::isnan(value) ? 12345.0f : value);
  }
  cases.push_back({.name = "float_from_half",
                   .headers = {"convert"},
                   .body = "  const int i = blockIdx.x * 1024 + thread;\n"
                           "  const float value = ptx::to_float(ptx::half{(unsigned short)i});\n"
                           "  ((float*)output)[i] = value != value ? 12345.0f : value;",
                   .shape = {.grid = {64, 1, 1}, .block = 1024},
                   .expected = bytes_of(all)});
  return cases;
}

inline WrapperCases math_cases() {
  WrapperCases cases;
  const auto add = [&](const char* name, const char* expression, double (*definition)(double), double tolerance) {
    std::vector<float> expected;
    for (int i = 0; i < 256; ++i) expected.push_back(static_cast<float>(definition(static_cast<double>(i - 128) / 8)));
    cases.push_back({.name = name,
                     .headers = {"math"},
                     .body = std::string("  const float x = (thread - 128) / 8.0f;\n"
                                         "  [[maybe_unused]] const float nan = __builtin_bit_cast(float, 0x7fc00000);\n"
                                         "  ((float*)output)[thread] = ") +
                             expression + ";",
                     .shape = {.block = 256},
                     .expected = bytes_of(expected),
                     .tolerance = tolerance});
  };
  add(
      "exp2", "ptx::exp2(x)", [](double x) { return std::exp2(x); }, 3e-7);
  add(
      "exp2_of_minus_infinity", "ptx::exp2(x - __builtin_bit_cast(float, 0x7f800000))", [](double) { return 0.0; }, 0);
  add(
      "log2", "ptx::log2(x * x + 2)", [](double x) { return std::log2(x * x + 2); }, 1e-6);
  add(
      "log2_of_zero", "ptx::log2(x * 0)", [](double) { return -HUGE_VAL; }, 0);
  add(
      "reciprocal", "ptx::reciprocal(x + 0.1f)", [](double x) -> double { return 1 / (static_cast<float>(x) + 0.1f); },
      2e-7);
  add(
      "fma", "ptx::fma(x, 0.1f, -0.3f)", [](double x) -> double { return std::fma(static_cast<float>(x), 0.1f, -0.3f); },
      0);
  add(
      "max", "ptx::max(x, 2.0f)", [](double x) { return std::fmax(x, 2.0); }, 0);
  add(
      "max_of_nan", "ptx::max(__builtin_bit_cast(float, 0x7fc00000), x)", [](double x) { return x; }, 0);
  add(
      "min", "ptx::min(x, 2.0f)", [](double x) { return std::fmin(x, 2.0); }, 0);
  add(
      "max_or_nan", "ptx::max_or_nan(x, 2.0f)", [](double x) { return std::fmax(x, 2.0); }, 0);
  add(
      "min_or_nan", "ptx::min_or_nan(x, 2.0f)", [](double x) { return std::fmin(x, 2.0); }, 0);
  for (const char* which : {"max", "min"}) {
    for (const bool first : {true, false}) {
      const std::string call = std::string("ptx::") + which + "_or_nan" + (first ? "(nan, x)" : "(x, nan)");
      add((which + std::string("_or_nan_of_nan_") + (first ? "first" : "second")).c_str(),
          (call + " == " + call + " ? 0.0f : 1.0f").c_str(), [](double) { return 1.0; }, 0);
    }
  }
  add(
      "abs", "ptx::abs(x)", [](double x) { return std::fabs(x); }, 0);
  add(
      "sqrt", "ptx::sqrt(x * x + 2)", [](double x) -> double { return std::sqrt(static_cast<float>(x * x + 2)); }, 0);
  add(
      "sin", "ptx::sin(x + 0.1f)",
      [](double x) -> double { return std::sin(static_cast<double>(static_cast<float>(x) + 0.1f)); }, 2e-6);
  add(
      "cos", "ptx::cos(x + 0.1f)",
      [](double x) -> double { return std::cos(static_cast<double>(static_cast<float>(x) + 0.1f)); }, 2e-6);
  add(
      "floor", "ptx::floor(x)", [](double x) { return std::floor(x); }, 0);
  std::vector<int> bits;
  for (unsigned i = 0; i < 256; ++i) {
    const unsigned word = i == 0 ? 0 : i * 0x9E3779B9u >> i % 32 << i % 7;
    bits.insert(bits.end(), {std::popcount(word), std::countl_zero(word), std::countr_zero(word)});
  }
  cases.push_back(
      {.name = "bits_of_a_word",
       .headers = {"bits"},
       .body = "  const unsigned word = thread == 0 ? 0 : thread * 0x9E3779B9u >> thread % 32 << thread % 7;\n"
               "  int* to = (int*)output + 3 * thread;\n"
               "  to[0] = ptx::count_ones(word), to[1] = ptx::leading_zeros(word), to[2] = ptx::trailing_zeros(word);",
       .shape = {.block = 256},
       .expected = bytes_of(bits)});
  return cases;
}

}  // namespace flash_attention::testing
