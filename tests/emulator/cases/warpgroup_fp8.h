#pragma once

#include "emulator/cases/values.h"
#include "emulator/wrapper_case.h"

namespace flash_attention::testing {

/// The code of a small integer: exact in both types.
inline std::uint8_t fp8_bits(bool e5m2, int value) {
  const int magnitude = value < 0 ? -value : value, exponent = magnitude == 0 ? 0 : std::ilogb(magnitude);
  const int mantissa = e5m2 ? 2 : 3, bias = e5m2 ? 15 : 7;
  const int fraction = magnitude == 0 ? 0 : (magnitude << mantissa >> exponent) - (1 << mantissa);
  const int code = magnitude == 0 ? 0 : (exponent + bias) << mantissa | fraction;
  return static_cast<std::uint8_t>(code | (value < 0 ? 0x80 : 0));
}

/// Products D[64 x n] = A B of 8-bit floats, both with k contiguous, A in shared memory or in registers. The sums are small
/// integers: no bit of them is cut off.
inline WrapperCases wgmma_fp8_cases() {
  struct Product {
    bool e5m2;
    int n;
    bool registers;
    int swizzle;
  };
  std::vector<Product> products;
  for (const int n : {32, 64, 96, 128, 160, 192, 224, 256}) products.push_back({false, n, false, 128});
  for (const int n : {32, 64, 96, 128, 160, 192, 224, 256}) products.push_back({false, n, true, 64});
  products.insert(products.end(), {{true, 128, false, 128}, {true, 64, true, 128}, {true, 128, true, 32}});
  WrapperCases cases;
  for (const Product& p : products) {
    const int k = p.swizzle;
    Bytes input;
    const auto put = [&](bool e5m2, int count, int salt) {
      for (int i = 0; i < count; ++i) input.push_back(fp8_bits(e5m2, small(i + salt)));
    };
    put(p.e5m2 && !p.registers, 64 * k, 0);  // A in registers is e4m3
    put(p.e5m2, k * p.n, 31);
    const std::vector<float> expected = product(
        64, p.n, k, [&](int i, int x) { return small(i * k + x); }, [&](int x, int j) { return small(j * k + x + 31); },
        [](int, int) { return 0; });
    const auto text = [](int value) { return std::to_string(value); };
    const std::string type = p.e5m2 ? "Type::e5m2" : "Type::e4m3";
    std::string body =
        "  constexpr int N = " + text(p.n) + ", K = " + text(k) +
        ";\n  const unsigned char* A = (const unsigned char*)input;\n  const unsigned char* B = A + 64 * K;\n"
        "  auto place = [&](int row, int k) {\n    const int byte = row * K + k;\n"
        "    return byte ^ (byte >> 7 & (K / 16 - 1)) << 4;\n  };\n"
        "  for (int i = thread; i < 64 * K; i += 128) shared.A[place(i / K, i % K)] = A[i];\n"
        "  for (int i = thread; i < N * K; i += 128) shared.B[place(i / K, i % K)] = B[i];\n"
        "  ptx::fence_async_shared();\n  __syncthreads();\n"
        "  float D[N / 2];\n  for (int i = 0; i < N / 2; ++i) D[i] = 1e30f;\n"
        "  unsigned fragment[K / 32][4];\n"
        "  const int row = thread / 32 * 16 + thread % 32 / 4, column = 2 * (thread % 4);\n"
        "  for (int s = 0; s < K / 32; ++s)\n    for (int r = 0; r < 4; ++r) {\n"
        "      const unsigned char* at = A + (row + 8 * (r % 2)) * K + s * 32 + 2 * column + 16 * (r / 2);\n"
        "      fragment[s][r] = at[0] | at[1] << 8 | at[2] << 16 | (unsigned)at[3] << 24;\n    }\n"
        "  const auto a = ptx::wgmma_descriptor(shared.A, 0, 8 * K, K);\n"
        "  const auto b = ptx::wgmma_descriptor(shared.B, 0, 8 * K, K);\n"
        "  ptx::wgmma_fence();\n#pragma unroll\n  for (int s = 0; s < K / 32; ++s)\n";
    body += p.registers ? "    ptx::wgmma_fp8_rs<" + type + ", N>(D, fragment[s], b + s * 2, s != 0);\n"
                        : "    ptx::wgmma_fp8_ss<" + type + ", " + type + ", N>(D, a + s * 2, b + s * 2, s != 0);\n";
    body +=
        "  ptx::wgmma_commit();\n  ptx::wgmma_wait<0>();\n  ptx::wgmma_pin(D);\n"
        "  for (int i = 0; i < N / 2; ++i)\n"
        "    ((float*)output)[(row + 8 * (i / 2 % 2)) * N + 8 * (i / 4) + column + i % 2] = D[i];";
    cases.push_back({.name = std::string("wgmma_fp8_") + (p.e5m2 ? "e5m2" : "e4m3") + "_n" + text(p.n) +
                             (p.registers ? "_rs_" : "_ss_") + text(p.swizzle),
                     .headers = {"wgmma_fp8", "fence"},
                     .storage = "  alignas(1024) unsigned char A[" + text(64 * k) + "];\n  alignas(1024) unsigned char B[" +
                                text(p.n * k) + "];",
                     .body = body,
                     .arch = 90,
                     .shape = {.block = 128},
                     .input = input,
                     .expected = bytes_of(expected)});
  }
  return cases;
}

}  // namespace flash_attention::testing
