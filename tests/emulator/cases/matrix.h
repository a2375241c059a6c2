#pragma once

#include "emulator/cases/values.h"
#include "emulator/wrapper_case.h"

namespace flash_attention::testing {

/// Tiles whose rows lie 80 bytes apart, so that no two are neighbours.
inline WrapperCases ldmatrix_cases() {
  WrapperCases cases;
  std::vector<std::uint16_t> elements(32 * 40);
  for (std::size_t i = 0; i < elements.size(); ++i) elements[i] = static_cast<std::uint16_t>(i * 3 + 1);
  constexpr int count = 4;
  for (const bool transposed : {false, true}) {
    std::vector<std::uint32_t> expected;
    for (int lane = 0; lane < 32; ++lane) {
      for (int tile = 0; tile < count; ++tile) {
        std::uint32_t pair = 0;
        for (int e = 0; e < 2; ++e) {
          const int row = transposed ? 2 * (lane % 4) + e : lane / 4, column = transposed ? lane / 4 : 2 * (lane % 4) + e;
          pair |= static_cast<std::uint32_t>(elements[static_cast<std::size_t>((tile * 8 + row) * 40 + column)])
                  << (16 * e);
        }
        expected.push_back(pair);
      }
    }
    const std::string n = std::to_string(count);
    cases.push_back(
        {.name = "ldmatrix_x" + n + (transposed ? "_trans" : ""),
         .headers = {"matrix", "shared"},
         .storage = "  alignas(16) unsigned short elements[32 * 40];",
         .body = "  for (int i = thread; i < 32 * 40; i += 32) shared.elements[i] = ((const unsigned short*)input)[i];\n"
                 "  __syncwarp();\n  unsigned tiles[" +
                 n +
                 "];\n"
                 "  ptx::ldmatrix_x" +
                 n + (transposed ? "_trans" : "") + "(tiles, ptx::shared_address(shared.elements + thread % (8 * " + n +
                 ") * 40));\n"
                 "  for (int i = 0; i < " +
                 n + "; ++i) ((unsigned*)output)[thread * " + n + " + i] = tiles[i];",
         .shape = {.block = 32},
         .input = bytes_of(elements),
         .expected = bytes_of(expected)});
  }
  return cases;
}

/// Element (row, column) of the tile is 100 row + column.
inline WrapperCases movmatrix_cases() {
  std::vector<std::uint32_t> expected;
  for (std::uint32_t lane = 0; lane < 32; ++lane) {
    const std::uint32_t low = 200 * (lane % 4) + lane / 4;
    expected.push_back(low | (low + 100) << 16);
  }
  return {{.name = "transpose_8x8",
           .headers = {"matrix"},
           .body = "  const unsigned low = thread / 4 * 100 + 2 * (thread % 4);\n"
                   "  ((unsigned*)output)[thread] = ptx::transpose_8x8(low | (low + 1) << 16);",
           .shape = {.block = 32},
           .expected = bytes_of(expected)}};
}

inline WrapperCases stmatrix_cases() {
  WrapperCases cases;
  for (const bool transposed : {false, true}) {
    std::vector<std::uint16_t> expected(32 * 8);
    for (int lane = 0; lane < 32; ++lane) {
      for (int tile = 0; tile < 4; ++tile) {
        for (int e = 0; e < 2; ++e) {
          const int row = transposed ? 2 * (lane % 4) + e : lane / 4, column = transposed ? lane / 4 : 2 * (lane % 4) + e;
          expected[static_cast<std::size_t>((tile * 8 + row) * 8 + column)] =
              static_cast<std::uint16_t>(lane * 100 + tile * 10 + e);
        }
      }
    }
    cases.push_back(
        {.name = transposed ? "stmatrix_x4_trans" : "stmatrix_x4",
         .headers = {"matrix_store"},
         .storage = "  alignas(16) unsigned short rows[32][40];",
         .body = std::string("  auto pair = [&](int tile) { const unsigned v = thread * 100 + tile * 10; return v | (v + "
                             "1) << 16; };\n  ptx::") +
                 (transposed ? "stmatrix_x4_trans" : "stmatrix_x4") +
                 "(shared.rows[thread], pair(0), pair(1), pair(2), pair(3));\n  __syncwarp();\n"
                 "  for (int i = 0; i < 8; ++i) ((unsigned short*)output)[thread * 8 + i] = shared.rows[thread][i];",
         .arch = 90,
         .shape = {.block = 32},
         .expected = bytes_of(expected)});
  }
  return cases;
}

inline WrapperCases mma_cases() {
  WrapperCases cases;
  // A [16][k], B [k][8] and C [16][8] hold small integers; fragments are gathered from global memory by the map of the ISA.
  const auto c = [](int i, int j) { return small(i * 8 + j + 500); };
  for (const bool fp16 : {false, true}) {
    const std::vector<std::uint16_t> A = small_bits(fp16, 16 * 16), B = small_bits(fp16, 16 * 8, 77);
    Bytes input = bytes_of(A);
    const Bytes b_bytes = bytes_of(B);
    input.insert(input.end(), b_bytes.begin(), b_bytes.end());
    const std::vector<float> expected = product(
        16, 8, 16, [](int i, int k) { return small(i * 16 + k); }, [](int k, int j) { return small(k * 8 + j + 77); }, c);
    const std::string type = fp16 ? "Type::float16" : "Type::bfloat16";
    const std::string prologue =
        "  const unsigned short* A = (const unsigned short*)input;\n  const unsigned short* B = A + 256;\n"
        "  const int g = thread / 4, t = thread % 4;\n"
        "  auto small = [](int i) { return (i * 7 + i / 5 * 3 + i / 64) % 11 - 5; };\n";
    cases.push_back(
        {.name = std::string("mma_m16n8k16_") + (fp16 ? "float16" : "bfloat16"),
         .headers = {"matrix"},
         .body = prologue +
                 "  unsigned a[4], b[2];\n  float d[4];\n"
                 "  for (int r = 0; r < 4; ++r) {\n"
                 "    const unsigned short* at = A + (g + 8 * (r % 2)) * 16 + 2 * t + 8 * (r / 2);\n"
                 "    a[r] = at[0] | (unsigned)at[1] << 16;\n"
                 "    d[r] = small((g + 8 * (r / 2)) * 8 + 2 * t + r % 2 + 500);\n  }\n"
                 "  for (int r = 0; r < 2; ++r) b[r] = B[(2 * t + 8 * r) * 8 + g] | (unsigned)B[(2 * t + 8 * r + 1) * 8 + "
                 "g] << 16;\n"
                 "  ptx::mma_m16n8k16<" +
                 type +
                 ">(d, a, b);\n"
                 "  for (int r = 0; r < 4; ++r) ((float*)output)[(g + 8 * (r / 2)) * 8 + 2 * t + r % 2] = d[r];",
         .shape = {.block = 32},
         .input = input,
         .expected = bytes_of(expected)});

    for (const bool transposed : {false, true}) {
      const std::vector<float> wide = product(
          16, 16, 16, [](int i, int k) { return small(i * 16 + k); },
          [&](int k, int j) { return small((transposed ? j * 16 + k : k * 16 + j) + 77); },
          [](int i, int j) { return small(i * 16 + j + 500); });
      Bytes both = bytes_of(A);
      const Bytes square = bytes_of(small_bits(fp16, 256, 77));
      both.insert(both.end(), square.begin(), square.end());
      cases.push_back(
          {.name = std::string("wmma_") + (transposed ? "transposed_" : "") + (fp16 ? "float16" : "bfloat16"),
           .headers = {"wmma", "shared"},
           .storage = "  alignas(32) unsigned short A[16][24];\n  alignas(32) unsigned short B[16][24];\n"
                      "  alignas(32) float D[16][20];",
           .body =
               "  for (int i = thread; i < 256; i += 32) {\n"
               "    shared.A[i / 16][i % 16] = ((const unsigned short*)input)[i];\n"
               "    shared.B[i / 16][i % 16] = ((const unsigned short*)input)[256 + i];\n  }\n  __syncwarp();\n"
               "  auto small = [](int i) { return (i * 7 + i / 5 * 3 + i / 64) % 11 - 5; };\n"
               "  ptx::WmmaOperand<" +
               type +
               "> a, b;\n  ptx::WmmaAccumulator d{};\n"
               "  ptx::wmma_load_a(a, ptx::shared_address(shared.A), 24);\n"
               "  ptx::wmma_load_b" +
               (transposed ? "_transposed" : "") +
               "(b, ptx::shared_address(shared.B), 24);\n"
               "  ptx::wmma_multiply<" +
               type + ", " + (transposed ? "true" : "false") +
               ">(d, a, b);\n"
               "  ptx::wmma_store(ptx::shared_address(shared.D), d, 20);\n  __syncwarp();\n"
               "  for (int i = thread; i < 256; i += 32) ((float*)output)[i] = shared.D[i / 16][i % 16] + small(i + 500);",
           .shape = {.block = 32},
           .input = both,
           .expected = bytes_of(wide)});
    }
  }
  // Codes: 1.5 and its like, and sums of them, have few bits.
  const auto code = [](bool e5m2, int i) {
    const int place = (i * 7 + i / 5 * 3 + i / 64) % 6;
    const int e4m3_codes[6] = {0x38, 0x3c, 0xb8, 0x00, 0x40, 0xc4}, e5m2_codes[6] = {0x3c, 0x3e, 0xbc, 0x00, 0x40, 0xc2};
    return static_cast<std::uint8_t>(e5m2 ? e5m2_codes[place] : e4m3_codes[place]);
  };
  const auto worth = [](int i) {
    const float values[6] = {1, 1.5f, -1, 0, 2, -3};
    return values[(i * 7 + i / 5 * 3 + i / 64) % 6];
  };
  for (const bool a_e5m2 : {false, true}) {
    for (const bool b_e5m2 : {false, true}) {
      std::vector<std::uint8_t> codes;
      for (int i = 0; i < 16 * 32; ++i) codes.push_back(code(a_e5m2, i));
      for (int i = 0; i < 32 * 8; ++i) codes.push_back(code(b_e5m2, i + 77));
      const std::string a_type = a_e5m2 ? "e5m2" : "e4m3", b_type = b_e5m2 ? "e5m2" : "e4m3";
      cases.push_back(
          {.name = "mma_m16n8k32_" + a_type + "_" + b_type,
           .headers = {"matrix"},
           .body = "  const unsigned char* A = (const unsigned char*)input;\n  const unsigned char* B = A + 512;\n"
                   "  const int g = thread / 4, t = thread % 4;\n"
                   "  auto small = [](int i) { return (i * 7 + i / 5 * 3 + i / 64) % 11 - 5; };\n"
                   "  unsigned a[4], b[2];\n  float d[4];\n"
                   "  for (int r = 0; r < 4; ++r) {\n    a[r] = 0;\n"
                   "    for (int i = 0; i < 4; ++i)\n"
                   "      a[r] |= (unsigned)A[(g + 8 * (r % 2)) * 32 + 4 * t + 16 * (r / 2) + i] << 8 * i;\n"
                   "    d[r] = small((g + 8 * (r / 2)) * 8 + 2 * t + r % 2 + 500);\n  }\n"
                   "  for (int r = 0; r < 2; ++r) {\n    b[r] = 0;\n"
                   "    for (int i = 0; i < 4; ++i) b[r] |= (unsigned)B[(4 * t + 16 * r + i) * 8 + g] << 8 * i;\n  }\n"
                   "  ptx::mma_m16n8k32<Type::" +
                   a_type + ", Type::" + b_type +
                   ">(d, a, b);\n"
                   "  for (int r = 0; r < 4; ++r) ((float*)output)[(g + 8 * (r / 2)) * 8 + 2 * t + r % 2] = d[r];",
           .arch = 89,
           .shape = {.block = 32},
           .input = bytes_of(codes),
           .expected = bytes_of(product(
               16, 8, 32, [&](int i, int k) { return worth(i * 32 + k); }, [&](int k, int j) { return worth(k * 8 + j + 77); },
               c))});
    }
  }
  const std::vector<float> tf32 = product(
      16, 8, 8, [](int i, int k) { return small(i * 8 + k); }, [](int k, int j) { return small(k * 8 + j + 77); }, c);
  cases.push_back({.name = "mma_m16n8k8_tf32",
                   .headers = {"matrix", "convert"},
                   .body = "  const int g = thread / 4, t = thread % 4;\n"
                           "  auto small = [](int i) { return (i * 7 + i / 5 * 3 + i / 64) % 11 - 5; };\n"
                           "  unsigned a[4], b[2];\n  float d[4];\n"
                           "  for (int r = 0; r < 4; ++r) {\n"
                           "    a[r] = ptx::to_tf32(small((g + 8 * (r % 2)) * 8 + t + 4 * (r / 2)));\n"
                           "    d[r] = small((g + 8 * (r / 2)) * 8 + 2 * t + r % 2 + 500);\n  }\n"
                           "  for (int r = 0; r < 2; ++r) b[r] = ptx::to_tf32(small((t + 4 * r) * 8 + g + 77));\n"
                           "  ptx::mma_m16n8k8_tf32(d, a, b);\n"
                           "  for (int r = 0; r < 4; ++r) ((float*)output)[(g + 8 * (r / 2)) * 8 + 2 * t + r % 2] = d[r];",
                   .shape = {.block = 32},
                   .expected = bytes_of(tf32)});
  return cases;
}

}  // namespace flash_attention::testing
