#pragma once

#include "emulator/cases/bulk.h"

namespace flash_attention::testing {

/// One product D[64 x n] = A B with the operands in shared memory as TMA would leave them.
struct ProductCase {
  bool fp16;
  int n;
  char a;  // 'k' or 'm': in shared memory, k or m contiguous; 'r': in registers
  bool b_mn;
  int swizzle;
};

inline std::string name_of(const ProductCase& p) {
  return std::string("wgmma_") + (p.fp16 ? "float16" : "bfloat16") + "_n" + std::to_string(p.n) +
         (p.a == 'r' ? "_rs" : "_ss") + (p.a == 'm' ? "_a_mn" : "") + (p.b_mn ? "_b_mn" : "") + "_" +
         std::to_string(p.swizzle);
}

inline WrapperCases wgmma_cases() {
  WrapperCases cases;
  std::vector<ProductCase> products;
  for (const int n : {32, 64, 80, 96, 128, 160, 176, 192, 224, 256}) products.push_back({false, n, 'k', false, 128});
  for (const int n : {64, 128, 192, 256}) products.push_back({false, n, 'r', true, 128});
  products.insert(products.end(), {{true, 64, 'k', false, 128},
                                   {true, 80, 'r', false, 128},
                                   {true, 128, 'r', true, 128},
                                   {false, 64, 'm', false, 128},
                                   {false, 128, 'm', true, 128},
                                   {true, 64, 'm', true, 128},
                                   {false, 64, 'k', false, 64},
                                   {false, 96, 'k', true, 64},
                                   {false, 64, 'm', true, 64},
                                   {false, 80, 'k', false, 32},
                                   {false, 32, 'r', true, 32}});
  for (const ProductCase& p : products) {
    const int span = p.swizzle / 2;  // elements of a swizzled row
    const int k = span;              // K extent where k is contiguous; where mn is, any multiple of 16
    const std::vector<std::uint16_t> A = small_bits(p.fp16, 64 * k), B = small_bits(p.fp16, k * p.n, 31);
    Bytes input = bytes_of(A);
    const Bytes b_bytes = bytes_of(B);
    input.insert(input.end(), b_bytes.begin(), b_bytes.end());
    const std::vector<float> expected = product(
        64, p.n, k, [&](int i, int x) { return small(i * k + x); }, [&](int x, int j) { return small(x * p.n + j + 31); },
        [](int, int) { return 0; });
    const auto text = [](int value) { return std::to_string(value); };
    // The operand (mn, k) of extent `extent` lies at `at`; descriptors step through k by `step` bytes.
    std::string body =
        "  constexpr int N = " + text(p.n) + ", K = " + text(k) + ", span = " + text(p.swizzle) +
        ";\n  constexpr Type type = Type::" + (p.fp16 ? "float16" : "bfloat16") +
        ";\n"
        "  const unsigned short* A = (const unsigned short*)input;\n  const unsigned short* B = A + 64 * K;\n"
        "  auto place = [&](int mn, int k, bool mn_major) {\n"
        "    const int byte = mn_major ? mn / (span / 2) * K * span + k * span + mn % (span / 2) * 2 : mn * span + k * 2;\n"
        "    return byte ^ (byte >> 7 & (span / 16 - 1)) << 4;\n  };\n";
    const std::string a_mn = p.a == 'm' ? "true" : "false", b_mn = p.b_mn ? "true" : "false";
    body +=
        "  for (int i = thread; i < 64 * K; i += 128)\n"
        "    *(unsigned short*)(shared.A + place(i / K, i % K, " +
        a_mn +
        ")) = A[i];\n"
        "  for (int i = thread; i < K * N; i += 128)\n"
        "    *(unsigned short*)(shared.B + place(i % N, i / N, " +
        b_mn +
        ")) = B[i];\n"
        "  ptx::fence_async_shared();\n  __syncthreads();\n"
        "  float D[N / 2];\n  for (int i = 0; i < N / 2; ++i) D[i] = 1e30f;\n"
        "  unsigned fragment[K / 16][4];\n"
        "  const int row = thread / 32 * 16 + thread % 32 / 4, column = 2 * (thread % 4);\n"
        "  for (int s = 0; s < K / 16; ++s)\n    for (int r = 0; r < 4; ++r) {\n"
        "      const unsigned short* at = A + (row + 8 * (r % 2)) * K + s * 16 + column + 8 * (r / 2);\n"
        "      fragment[s][r] = at[0] | (unsigned)at[1] << 16;\n    }\n"
        "  constexpr int a_step = (" +
        a_mn + " ? 16 * span : 32) / 16, b_step = (" + b_mn +
        " ? 16 * span : 32) / 16;\n"
        "  const auto a = ptx::wgmma_descriptor(shared.A, K * span, 8 * span, span);\n"
        "  const auto b = ptx::wgmma_descriptor(shared.B, K * span, 8 * span, span);\n"
        "  ptx::wgmma_fence();\n#pragma unroll\n  for (int s = 0; s < K / 16; ++s)\n";
    if (p.a == 'r') {
      body += "    ptx::wgmma_rs<type, N, ptx::Major::" + std::string(p.b_mn ? "mn" : "k") +
              ">(D, fragment[s], b + s * b_step, s != 0);\n";
    } else {
      body += "    ptx::wgmma_ss<type, N, ptx::Major::" + std::string(p.a == 'm' ? "mn" : "k") +
              ", ptx::Major::" + (p.b_mn ? "mn" : "k") + ">(D, a + s * a_step, b + s * b_step, s != 0);\n";
    }
    body +=
        "  ptx::wgmma_commit();\n  ptx::wgmma_wait<0>();\n  ptx::wgmma_pin(D);\n"
        "  for (int i = 0; i < N / 2; ++i)\n"
        "    ((float*)output)[(row + 8 * (i / 2 % 2)) * N + 8 * (i / 4) + column + i % 2] = D[i];";
    const int b_bytes_smem = p.b_mn ? (p.n + span - 1) / span * k * p.swizzle : p.n * p.swizzle;
    cases.push_back({.name = name_of(p),
                     .headers = {"wgmma", "fence"},
                     .storage = "  alignas(1024) unsigned char A[" + text(64 * p.swizzle) +
                                "];\n  alignas(1024) unsigned char B[" + text(b_bytes_smem) + "];",
                     .body = body,
                     .arch = 90,
                     .shape = {.block = 128},
                     .input = input,
                     .expected = bytes_of(expected)});
  }
  // Two groups in flight on two accumulators, the first continued after its wait.
  const int k = 64, n = 64;
  const std::vector<std::uint16_t> A = small_bits(false, 64 * k), B = small_bits(false, k * n, 31);
  Bytes input = bytes_of(A);
  const Bytes b_bytes = bytes_of(B);
  input.insert(input.end(), b_bytes.begin(), b_bytes.end());
  const auto a_of = [&](int i, int x) { return small(i * k + x); };
  const auto b_of = [&](int x, int j) { return small(x * n + j + 31); };
  std::vector<float> expected = product(64, n, 16, a_of, b_of, [](int, int) { return 0; });
  for (float& value : expected) value = 2 * value + 3;
  const std::vector<float> other = product(
      64, n, 16, [&](int i, int x) { return a_of(i, x + 16); }, [&](int x, int j) { return b_of(x + 16, j); },
      [](int, int) { return 0; });
  expected.insert(expected.end(), other.begin(), other.end());
  cases.push_back(
      {.name = "wgmma_groups",
       .headers = {"wgmma", "fence"},
       .storage = "  alignas(1024) unsigned char A[8192];\n  alignas(1024) unsigned char B[8192];",
       .body =
           "  for (int i = thread; i < 4096; i += 128) {\n"
           "    const int a = i * 2, row = i % 64 * 128 + i / 64 * 2;\n"
           "    *(unsigned short*)(shared.A + (a ^ (a >> 7 & 7) << 4)) = ((const unsigned short*)input)[i];\n"
           "    *(unsigned short*)(shared.B + (row ^ (row >> 7 & 7) << 4)) = ((const unsigned short*)input)[4096 + i];\n  "
           "}\n"
           "  ptx::fence_async_shared();\n  __syncthreads();\n"
           "  float first[32], second[32];\n"
           "  const auto a = ptx::wgmma_descriptor(shared.A, 16, 1024), b = ptx::wgmma_descriptor(shared.B, 16, 1024);\n"
           "  auto multiply = [&](float (&D)[32], int step, bool accumulate) {\n"
           "    ptx::wgmma_fence();\n"
           "    ptx::wgmma_ss<Type::bfloat16, 64, ptx::Major::k, ptx::Major::k>(D, a + step, b + step, accumulate);\n"
           "    ptx::wgmma_commit();\n  };\n"
           "  multiply(first, 0, false);\n  multiply(second, 2, false);\n"
           "  ptx::wgmma_wait<1>();\n  ptx::wgmma_pin(first);\n  for (int i = 0; i < 32; ++i) first[i] += 3;\n"
           "  ptx::wgmma_pin(first);\n  multiply(first, 0, true);\n  ptx::wgmma_wait<0>();\n"
           "  ptx::wgmma_pin(first);\n  ptx::wgmma_pin(second);\n"
           "  for (int i = 0; i < 32; ++i) {\n"
           "    const int row = thread / 32 * 16 + thread % 32 / 4 + 8 * (i / 2 % 2), column = 8 * (i / 4) + 2 * (thread % "
           "4) + i % 2;\n"
           "    ((float*)output)[row * 64 + column] = first[i];\n    ((float*)output)[4096 + row * 64 + column] = "
           "second[i];\n  }",
       .arch = 90,
       .shape = {.block = 128},
       .input = input,
       .expected = bytes_of(expected)});
  return cases;
}

/// Each block of a pair loads one of two chunks of rows for both, three times.
inline WrapperCase multicast_of_chunks() {
  const BoxCase b{"", 5, {64, 24, 2, 1, 1}, {64, 8, 1, 1, 1}, {0, 0, 0, 0, 0}, 128};
  std::vector<std::uint16_t> tensor(64 * 48), expected;
  for (std::size_t i = 0; i < tensor.size(); ++i) tensor[i] = static_cast<std::uint16_t>(i * 3 + 1);
  for (int block = 0; block < 2; ++block) {
    for (int row = 0; row < 48; ++row) {
      const int round = row / 16, chunk = row / 8 % 2, of_tensor = chunk * 24 + round * 8 + row % 8;
      for (int byte = 0; byte < 128; byte += 2)
        expected.push_back(tensor[static_cast<std::size_t>(of_tensor * 64 + (byte ^ (row % 8) << 4) / 2)]);
    }
  }
  return {.name = "tma_multicast_chunks",
          .headers = {"cluster", "tma"},
          .storage = "  alignas(1024) unsigned char box[16 * 128];\n  ptx::Mbarrier full, empty;",
          .body =
              "  const unsigned rank = ptx::cluster_rank();\n"
              "  if (thread == 0) {\n    ptx::mbarrier_init(shared.full, 1);\n    ptx::mbarrier_init(shared.empty, 2);\n"
              "    ptx::mbarrier_init_fence();\n  }\n  ptx::cluster_arrive();\n  ptx::cluster_wait();\n"
              "  for (int round = 0; round < 3; ++round) {\n"
              "    if (thread == 0) {\n      ptx::mbarrier_wait(shared.empty, (round & 1) ^ 1);\n"
              "      ptx::mbarrier_arrive_expect_tx(shared.full, 2048);\n"
              "      ptx::tma_multicast_5d(shared.box + rank * 1024, args.maps[0], shared.full, 3, 0, round * 8, rank, 0, "
              "0);\n    }\n"
              "    ptx::mbarrier_wait(shared.full, round & 1);\n"
              "    for (int i = thread; i < 2048; i += 64) output[(blockIdx.x * 3 + round) * 2048 + i] = shared.box[i];\n"
              "    __syncthreads();\n"
              "    if (thread < 2) ptx::cluster_mbarrier_arrive_read(ptx::cluster_address(&shared.empty, thread));\n  }\n"
              "  ptx::cluster_arrive();\n  ptx::cluster_wait();",
          .arch = 90,
          .shape = {.grid = {2, 1, 1}, .block = 64, .cluster = 2},
          .input = bytes_of(tensor),
          .expected = bytes_of(expected),
          .maps = {map_of(b, false)}};
}

/// Two blocks tell each other a word, and neither ends before the other has read it.
inline WrapperCase words_of_other_block() {
  return {.name = "cluster_words",
          .headers = {"cluster", "shared"},
          .storage = "  unsigned word;\n  ptx::Mbarrier met;",
          .body =
              "  const unsigned rank = ptx::cluster_rank();\n"
              "  if (thread == 0) {\n    ptx::mbarrier_init(shared.met, 2);\n    ptx::mbarrier_init_fence();\n  }\n"
              "  ptx::cluster_arrive();\n  ptx::cluster_wait();\n"
              "  if (thread == 0) {\n"
              "    ptx::store_shared(ptx::shared_address(&shared.word), 1000u * rank + 7);\n"
              "    for (unsigned r = 0; r < 2; ++r) ptx::cluster_mbarrier_arrive(ptx::cluster_address(&shared.met, r));\n"
              "    ptx::cluster_mbarrier_wait(shared.met, 0);\n"
              "    ((unsigned*)output)[rank] = ptx::cluster_load_word(ptx::cluster_address(&shared.word, rank ^ 1));\n"
              "    for (unsigned r = 0; r < 2; ++r) ptx::cluster_mbarrier_arrive(ptx::cluster_address(&shared.met, r));\n"
              "    ptx::cluster_mbarrier_wait(shared.met, 1);\n  }",
          .arch = 90,
          .shape = {.grid = {2, 1, 1}, .block = 64, .cluster = 2},
          .expected = bytes_of(std::vector<unsigned>{1007, 7})};
}

/// Each block of four sends a pair and four floats to the next one, which waits for their bytes.
inline WrapperCase floats_sent_to_next_block() {
  std::vector<float> expected;
  for (int block = 0; block < 4; ++block) {
    const int from = (block + 3) % 4 * 100;
    for (int i = 0; i < 6; ++i) expected.push_back(static_cast<float>(from + i));
  }
  return {.name = "cluster_store_async",
          .headers = {"cluster", "shared"},
          .storage = "  alignas(16) float values[6];\n  ptx::Mbarrier received;",
          .body =
              "  const unsigned rank = ptx::cluster_rank(), next = (rank + 1) % 4;\n"
              "  if (thread == 0) {\n    ptx::mbarrier_init(shared.received, 1);\n    ptx::mbarrier_init_fence();\n"
              "    ptx::mbarrier_arrive_expect_tx(shared.received, 24);\n  }\n  __syncwarp();\n"
              "  ptx::cluster_arrive_relaxed();\n  ptx::cluster_wait();\n"
              "  if (thread == 0) {\n"
              "    const unsigned to = ptx::cluster_address(shared.values, next);\n"
              "    const unsigned barrier = ptx::cluster_address(&shared.received, next);\n"
              "    const float x = rank * 100;\n"
              "    ptx::cluster_store_async(to, ptx::Vector<float, 4>{{x, x + 1, x + 2, x + 3}}, barrier);\n"
              "    ptx::cluster_store_async(to + 16, ptx::Vector<float, 2>{{x + 4, x + 5}}, barrier);\n"
              "    ptx::cluster_mbarrier_wait(shared.received, 0);\n"
              "    for (int i = 0; i < 6; ++i)\n"
              "      ((float*)output)[rank * 6 + i] = ptx::load_shared<float>(ptx::shared_address(shared.values + i));\n"
              "  }",
          .arch = 90,
          .shape = {.grid = {4, 1, 1}, .block = 64, .cluster = 4},
          .expected = bytes_of(expected)};
}

inline WrapperCases cluster_cases() {
  WrapperCases cases;
  std::vector<unsigned> peers;
  for (int block = 0; block < 4; ++block) {
    for (int t = 0; t < 64; ++t) peers.push_back(static_cast<unsigned>((block ^ 1) * 1000 + 63 - t + block % 2 * 10000));
  }
  cases.push_back(
      {.name = "cluster_load_word",
       .headers = {"cluster", "shared"},
       .storage = "  unsigned values[64];",
       .body = "  shared.values[thread] = blockIdx.x * 1000 + thread;\n"
               "  ptx::cluster_arrive();\n  ptx::cluster_wait();\n"
               "  const unsigned rank = ptx::cluster_rank();\n"
               "  ((unsigned*)output)[blockIdx.x * 64 + thread] =\n"
               "      ptx::cluster_load_word(ptx::cluster_address(&shared.values[63 - thread], rank ^ 1)) + rank * 10000;\n"
               "  ptx::cluster_arrive_relaxed();\n  ptx::cluster_wait();",
       .arch = 90,
       .shape = {.grid = {4, 1, 1}, .block = 64, .cluster = 2},
       .expected = bytes_of(peers)});
  // Each block of a pair loads half of the box for both; the slot is free again when both have said so.
  const BoxCase b{"", 4, {64, 48, 1, 1}, {64, 8, 1, 1}, {0, 0, 0, 0}, 128};
  std::vector<std::uint16_t> tensor(64 * 48), expected;
  for (std::size_t i = 0; i < tensor.size(); ++i) tensor[i] = static_cast<std::uint16_t>(i * 5 + 2);
  for (int block = 0; block < 2; ++block) {
    for (int row = 0; row < 48; ++row) {
      for (int byte = 0; byte < 128; byte += 2)
        expected.push_back(tensor[static_cast<std::size_t>(row * 64 + (byte ^ (row % 8) << 4) / 2)]);
    }
  }
  cases.push_back(
      {.name = "tma_multicast",
       .headers = {"cluster", "tma"},
       .storage = "  alignas(1024) unsigned char box[16 * 128];\n  ptx::Mbarrier full, empty;",
       .body = "  const unsigned rank = ptx::cluster_rank();\n"
               "  if (thread == 0) {\n    ptx::mbarrier_init(shared.full, 1);\n    ptx::mbarrier_init(shared.empty, 2);\n"
               "    ptx::mbarrier_init_fence();\n  }\n  ptx::cluster_arrive();\n  ptx::cluster_wait();\n"
               "  for (int round = 0; round < 3; ++round) {\n"
               "    if (thread == 0) {\n      ptx::mbarrier_wait(shared.empty, (round & 1) ^ 1);\n"
               "      ptx::mbarrier_arrive_expect_tx(shared.full, 2048);\n"
               "      ptx::tma_multicast_4d(shared.box + rank * 1024, args.maps[0], shared.full, 3, 0, round * 16 + rank * "
               "8, 0, 0);\n    }\n"
               "    ptx::mbarrier_wait(shared.full, round & 1);\n"
               "    for (int i = thread; i < 2048; i += 64) output[(blockIdx.x * 3 + round) * 2048 + i] = shared.box[i];\n"
               "    __syncthreads();\n"
               "    if (thread < 2) ptx::cluster_mbarrier_arrive(ptx::cluster_address(&shared.empty, thread));\n  }\n"
               "  ptx::cluster_arrive();\n  ptx::cluster_wait();",
       .arch = 90,
       .shape = {.grid = {2, 1, 1}, .block = 64, .cluster = 2},
       .input = bytes_of(tensor),
       .expected = bytes_of(expected),
       .maps = {map_of(b, false)}});
  cases.push_back(multicast_of_chunks());
  cases.push_back(words_of_other_block());
  cases.push_back(floats_sent_to_next_block());
  return cases;
}

}  // namespace flash_attention::testing
