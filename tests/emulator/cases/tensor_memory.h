#pragma once

#include "emulator/cases/values.h"
#include "emulator/wrapper_case.h"

namespace flash_attention::testing {

/// One product D[128 x n] = A B over k = 64, operands as TMA would leave them: rows of 128 bytes, swizzled.
struct TensorCase {
  bool fp16;
  int n;
  char a;  // 'k' or 'm': in shared memory, k or m contiguous; 't': in tensor memory
  bool b_mn;
};

inline std::string name_of(const TensorCase& t) {
  return std::string("tcgen05_") + (t.fp16 ? "float16" : "bfloat16") + "_n" + std::to_string(t.n) +
         (t.a == 't' ? "_ts" : "_ss") + (t.a == 'm' ? "_a_mn" : "") + (t.b_mn ? "_b_mn" : "");
}

inline const char* const tensor_prologue =
    "  if (thread < 32) {\n    ptx::tmem_alloc<256>(shared.columns);\n    ptx::tmem_relinquish();\n  }\n"
    "  if (thread == 0) {\n    ptx::mbarrier_init(shared.done, 1);\n    ptx::mbarrier_init_fence();\n  }\n"
    "  const unsigned lanes = (unsigned)(thread / 32 % 4 * 32) << 16;\n";
inline const char* const tensor_epilogue =
    "  ptx::tcgen05_fence_before();\n  __syncthreads();\n"
    "  if (thread < 32) {\n    ptx::tcgen05_fence_after();\n    ptx::tmem_dealloc<256>(base);\n  }";
/// Copies A [128][64] and B [64][N] of the input to swizzled tiles.
inline const char* const tensor_tiles =
    "  auto place = [&](int mn, int k, bool mn_major) {\n"
    "    const int byte = mn_major ? mn / 64 * 64 * 128 + k * 128 + mn % 64 * 2 : mn * 128 + k * 2;\n"
    "    return byte ^ (byte >> 7 & 7) << 4;\n  };\n"
    "  const unsigned short* A = (const unsigned short*)input;\n  const unsigned short* B = A + 128 * 64;\n"
    "  for (int i = thread; i < 128 * 64; i += 128)\n"
    "    *(unsigned short*)(shared.A + place(i / 64, i % 64, a_major == ptx::Tcgen05Major::mn)) = A[i];\n"
    "  for (int i = thread; i < 64 * N; i += 128)\n"
    "    *(unsigned short*)(shared.B + place(i % N, i / N, b_major == ptx::Tcgen05Major::mn)) = B[i];\n"
    "  ptx::fence_async_shared();\n";

inline WrapperCase tensor_case(const TensorCase& t) {
  const std::vector<std::uint16_t> A = small_bits(t.fp16, 128 * 64), B = small_bits(t.fp16, 64 * t.n, 31);
  Bytes input = bytes_of(A);
  const Bytes b_bytes = bytes_of(B);
  input.insert(input.end(), b_bytes.begin(), b_bytes.end());
  const std::vector<float> expected = product(
      128, t.n, 64, [&](int i, int x) { return small(i * 64 + x); }, [&](int x, int j) { return small(x * t.n + j + 31); },
      [](int, int) { return 0; });
  const auto text = [](int value) { return std::to_string(value); };
  const bool a_mn = t.a == 'm';
  std::string body = std::string("  using ptx::Tcgen05Major;\n  constexpr Tcgen05Major a_major = Tcgen05Major::") +
                     (a_mn ? "mn" : "k") + ", b_major = Tcgen05Major::" + (t.b_mn ? "mn" : "k") +
                     ";\n  constexpr int N = " + text(t.n) + ";\n" + tensor_prologue + tensor_tiles;
  body += "  __syncthreads();\n  const unsigned base = shared.columns;\n";
  if (t.a == 't') {
    body +=
        "  unsigned row[32];\n  for (int i = 0; i < 32; ++i)\n"
        "    row[i] = A[thread * 64 + 2 * i] | (unsigned)A[thread * 64 + 2 * i + 1] << 16;\n"
        "  ptx::tmem_store((base + N) | lanes, row);\n  ptx::tmem_wait_store();\n  ptx::tcgen05_fence_before();\n"
        "  __syncthreads();\n";
  }
  body +=
      "  if (thread == 0) {\n    ptx::tcgen05_fence_after();\n"
      "    constexpr unsigned shape = ptx::tcgen05_shape<Type::" +
      std::string(t.fp16 ? "float16" : "bfloat16") +
      ", N, a_major, b_major>();\n"
      "    const auto b = ptx::tcgen05_descriptor(shared.B, 64 * 128, 1024);\n"
      "    constexpr int b_step = (b_major == Tcgen05Major::mn ? 16 * 128 : 32) / 16;\n";
  if (t.a == 't') {
    body += "    for (int s = 0; s < 4; ++s) ptx::tcgen05_mma_ts(base, base + N + 8 * s, b + s * b_step, shape, s != 0);\n";
  } else {
    body +=
        "    const auto a = ptx::tcgen05_descriptor(shared.A, 64 * 128, 1024);\n"
        "    constexpr int a_step = (a_major == Tcgen05Major::mn ? 16 * 128 : 32) / 16;\n"
        "    for (int s = 0; s < 4; ++s) ptx::tcgen05_mma_ss(base, a + s * a_step, b + s * b_step, shape, s != 0);\n";
  }
  body +=
      "    ptx::tcgen05_commit(shared.done);\n  }\n"
      "  ptx::mbarrier_wait(shared.done, 0);\n  ptx::tcgen05_fence_after();\n"
      "  for (int n = 0; n < N; n += 16) {\n    float D[16];\n    ptx::tmem_load(D, (base + n) | lanes);\n"
      "    ptx::tmem_wait_load();\n    ptx::tmem_pin(D);\n"
      "    for (int i = 0; i < 16; ++i) ((float*)output)[thread * N + n + i] = D[i];\n  }\n";
  const int b_bytes_smem = t.b_mn ? (t.n + 63) / 64 * 8192 : t.n * 128;
  return {.name = name_of(t),
          .headers = {"tcgen05", "fence", "memory"},
          .storage = "  alignas(1024) unsigned char A[16384];\n  alignas(1024) unsigned char B[" + text(b_bytes_smem) +
                     "];\n  unsigned columns;\n  ptx::Mbarrier done;",
          .body = body + tensor_epilogue,
          .arch = 100,
          .shape = {.block = 128},
          .input = input,
          .expected = bytes_of(expected)};
}

/// A warpgroup writes rows of tensor memory, another reads them; then it writes them again.
inline WrapperCase tensor_rows_case() {
  std::vector<std::uint32_t> expected;
  for (unsigned round = 0; round < 2; ++round) {
    for (unsigned row = 0; row < 128; ++row) {
      for (unsigned i = 0; i < 48; ++i)
        expected.push_back(std::bit_cast<std::uint32_t>(static_cast<float>(row * 64 + i + round)));
    }
  }
  return {
      .name = "tmem_rows",
      .headers = {"tcgen05"},
      .storage = "  unsigned columns;\n  ptx::Mbarrier done;",
      .body =
          std::string(tensor_prologue) +
          "  __syncthreads();\n  const unsigned base = shared.columns;\n"
          "  for (int round = 0; round < 2; ++round) {\n"
          "    if (thread < 128) {\n      float row[32], rest[16];\n"
          "      for (int i = 0; i < 32; ++i) row[i] = thread * 64 + i + round;\n"
          "      for (int i = 0; i < 16; ++i) rest[i] = thread * 64 + 32 + i + round;\n"
          "      ptx::tmem_store(base | lanes, row);\n      ptx::tmem_store((base + 32) | lanes, rest);\n"
          "      ptx::tmem_wait_store();\n      ptx::tcgen05_fence_before();\n    }\n"
          "    __syncthreads();\n"
          "    if (thread >= 128) {\n      ptx::tcgen05_fence_after();\n      float row[32], rest[16];\n"
          "      ptx::tmem_load(row, base | lanes);\n      ptx::tmem_load(rest, (base + 32) | lanes);\n"
          "      ptx::tmem_wait_load();\n      ptx::tmem_pin(row);\n      ptx::tmem_pin(rest);\n"
          "      float* to = (float*)output + (round * 128 + thread - 128) * 48;\n"
          "      for (int i = 0; i < 32; ++i) to[i] = row[i];\n      for (int i = 0; i < 16; ++i) to[32 + i] = rest[i];\n"
          "      ptx::tcgen05_fence_before();  // read\n    }\n"
          "    __syncthreads();\n    ptx::tcgen05_fence_after();  // all\n  }\n" +
          tensor_epilogue,
      .arch = 100,
      .shape = {.block = 256},
      .expected = bytes_of(expected)};
}

/// D = (A B + 1) in 16 bits, then D B: a product whose A is made of the one before, in the columns of its D.
inline WrapperCase tensor_chain_case() {
  const auto a_of = [](int i, int x) { return small(i * 64 + x) % 2; };
  const auto b_of = [](int x, int j) { return small(x * 64 + j + 31) % 2; };
  const std::vector<float> first = product(128, 64, 64, a_of, b_of, [](int, int) { return 1; });
  const std::vector<float> expected = product(
      128, 64, 64, [&](int i, int x) { return first[static_cast<std::size_t>(i * 64 + x)]; }, b_of,
      [](int, int) { return 0; });
  std::vector<std::uint16_t> values;
  for (int i = 0; i < 128 * 64; ++i) values.push_back(bf16_bits(static_cast<float>(a_of(i / 64, i % 64))));
  for (int i = 0; i < 64 * 64; ++i) values.push_back(bf16_bits(static_cast<float>(b_of(i / 64, i % 64))));
  return {
      .name = "tcgen05_chain",
      .headers = {"tcgen05", "fence", "convert"},
      .storage =
          "  alignas(1024) unsigned char A[16384];\n  alignas(1024) unsigned char B[8192];\n  unsigned columns;\n"
          "  ptx::Mbarrier done;",
      .body = std::string("  using ptx::Tcgen05Major;\n  constexpr int N = 64;\n"
                          "  constexpr Tcgen05Major a_major = Tcgen05Major::k, b_major = Tcgen05Major::mn;\n") +
              tensor_prologue + tensor_tiles +
              "  __syncthreads();\n  const unsigned base = shared.columns, O = base + 64;\n"
              "  constexpr unsigned shape = ptx::tcgen05_shape<Type::bfloat16, N, a_major, b_major>();\n"
              "  const auto a = ptx::tcgen05_descriptor(shared.A, 8192, 1024), b = ptx::tcgen05_descriptor(shared.B, 8192, "
              "1024);\n"
              "  if (thread == 0) {\n"
              "    for (int s = 0; s < 4; ++s) ptx::tcgen05_mma_ss(base, a + 2 * s, b + 128 * s, shape, s != 0);\n"
              "    ptx::tcgen05_commit(shared.done);\n  }\n"
              "  ptx::mbarrier_wait(shared.done, 0);\n  ptx::tcgen05_fence_after();  // S\n"
              "  float S[32];\n  unsigned P[16];\n"
              "  for (int half = 0; half < 64; half += 32) {\n"
              "    ptx::tmem_load(S, (base + half) | lanes);\n    ptx::tmem_wait_load();\n    ptx::tmem_pin(S);\n"
              "    for (int i = 0; i < 16; ++i) P[i] = ptx::pack<Type::bfloat16>(S[2 * i] + 1, S[2 * i + 1] + 1);\n"
              "    ptx::tmem_store((base + half / 2) | lanes, P);\n  }\n"
              "  ptx::tmem_wait_store();\n  ptx::tcgen05_fence_before();  // P\n  __syncthreads();\n"
              "  if (thread == 0) {\n    ptx::tcgen05_fence_after();  // P\n"
              "    for (int s = 0; s < 4; ++s) ptx::tcgen05_mma_ts(O, base + 8 * s, b + 128 * s, shape, s != 0);\n"
              "    ptx::tcgen05_commit(shared.done);\n  }\n"
              "  ptx::mbarrier_wait(shared.done, 1);\n  ptx::tcgen05_fence_after();  // free\n  __syncthreads();\n"
              "  if (thread == 0) {\n"
              "    for (int s = 0; s < 4; ++s) ptx::tcgen05_mma_ss(base, a + 2 * s, b + 128 * s, shape, s != 0);\n"
              "    ptx::tcgen05_commit(shared.done);\n  }\n"
              "  ptx::mbarrier_wait(shared.done, 0);\n  ptx::tcgen05_fence_after();  // O\n"
              "  for (int n = 0; n < 64; n += 32) {\n"
              "    ptx::tmem_load(S, (O + n) | lanes);\n    ptx::tmem_wait_load();\n    ptx::tmem_pin(S);\n"
              "    for (int i = 0; i < 32; ++i) ((float*)output)[thread * 64 + n + i] = S[i];\n  }\n" +
              tensor_epilogue,
      .arch = 100,
      .shape = {.block = 128},
      .input = bytes_of(values),
      .expected = bytes_of(expected)};
}

inline WrapperCases tensor_memory_cases() {
  WrapperCases cases;
  for (const TensorCase& t : std::vector<TensorCase>{{false, 16, 'k', false},
                                                     {false, 64, 'k', false},
                                                     {false, 128, 'k', true},
                                                     {true, 80, 'k', true},
                                                     {true, 128, 'k', false},
                                                     {false, 192, 'm', true},
                                                     {true, 64, 't', true},
                                                     {false, 128, 't', true},
                                                     {false, 96, 't', false}})
    cases.push_back(tensor_case(t));
  cases.push_back(tensor_rows_case());
  cases.push_back(tensor_chain_case());
  return cases;
}

inline WrapperCases float_pair_cases() {
  const std::vector<float> values{1.5f, -2.25f, 3.0f, 0.5f, -7.0f, 1e-3f, 1.0f, -1.0f, 4096.5f, -0.125f, 2.0f, 3.5f};
  std::vector<float> expected;
  for (std::size_t i = 0; i < values.size(); i += 6) {
    const float* v = values.data() + i;
    for (std::size_t j = 0; j < 2; ++j) expected.push_back(std::fma(v[j], v[2 + j], v[4 + j]));
    for (std::size_t j = 0; j < 2; ++j) expected.push_back(v[j] + v[2 + j]);
    expected.push_back(std::max(std::max(v[0], v[1]), v[2]));
    expected.push_back(v[4]);  // a NaN is left out
  }
  return {{.name = "float_pairs",
           .headers = {"float_pairs"},
           .body = "  const float* v = (const float*)input + 6 * thread;\n  float* to = (float*)output + 6 * thread;\n"
                   "  const ptx::FloatPair a{v[0], v[1]}, b{v[2], v[3]}, c{v[4], v[5]};\n"
                   "  const auto put = [&](int at, ptx::FloatPair p) { to[at] = p.x; to[at + 1] = p.y; };\n"
                   "  put(0, ptx::fma_pair(a, b, c));\n  put(2, ptx::add_pair(a, b));\n"
                   "  to[4] = ptx::max3(v[0], v[1], v[2]);\n  to[5] = ptx::max3(__builtin_bit_cast(float, 0x7fffffffu), v[4], v[4]);",
           .arch = 100,
           .shape = {.block = 2},
           .input = bytes_of(values),
           .expected = bytes_of(expected)}};
}

}  // namespace flash_attention::testing
