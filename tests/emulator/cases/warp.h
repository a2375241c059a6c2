#pragma once

#include "emulator/cases/values.h"
#include "emulator/wrapper_case.h"

namespace flash_attention::testing {

inline WrapperCases warp_cases() {
  WrapperCases cases;
  const auto lanes = [](auto f) {
    std::vector<int> values;
    for (int lane = 0; lane < 64; ++lane) values.push_back(f(lane));
    return bytes_of(values);
  };
  const auto add = [&](const char* name, const char* expression, const Bytes& expected) {
    cases.push_back(
        {.name = name,
         .headers = {"warp"},
         .body = std::string("  const int value = thread * 10 + 3;\n  ((int*)output)[thread] = ") + expression + ";",
         .shape = {.block = 64},
         .expected = expected});
  };
  const auto value = [](int thread) { return thread * 10 + 3; };
  add("shuffle_xor", "ptx::shuffle_xor(value, 5)", lanes([&](int t) { return value(t ^ 5); }));
  add("shuffle", "ptx::shuffle(value, (thread * 3) % 32)", lanes([&](int t) { return value(t / 32 * 32 + t * 3 % 32); }));
  add("shuffle_up", "ptx::shuffle_up(value, 3)", lanes([&](int t) { return value(t % 32 < 3 ? t : t - 3); }));
  add("ballot", "ptx::ballot(thread % 3 == 1)", lanes([&](int t) {
        unsigned bits = 0;
        for (int lane = 0; lane < 32; ++lane) bits |= (t / 32 * 32 + lane) % 3 == 1 ? 1u << lane : 0;
        return static_cast<int>(bits);
      }));
  add("any_all", "ptx::any(thread == 40) + 2 * ptx::all(thread < 40) + 4 * ptx::all(thread < 32)",
      lanes([&](int t) { return t < 32 ? 2 + 4 : 1; }));
  cases.push_back({.name = "elect",
                   .headers = {"warp"},
                   .body = "  const unsigned lanes = ptx::ballot(ptx::elect());\n"
                           "  ((int*)output)[thread] = lanes != 0 && (lanes & (lanes - 1)) == 0;",
                   .arch = 90,
                   .shape = {.block = 64},
                   .expected = lanes([](int) { return 1; })});
  cases.push_back({.name = "clock",
                   .headers = {"clock"},
                   .body = "  const unsigned long long before = ptx::clock();\n"
                           "  ((int*)output)[thread] = ptx::clock() >= before;",
                   .shape = {.block = 64},
                   .expected = lanes([](int) { return 1; })});
  cases.push_back({.name = "syncwarp",
                   .headers = {"shared"},
                   .storage = "  int values[64];",
                   .body = "  shared.values[thread] = thread * thread;\n  __syncwarp();\n"
                           "  ((int*)output)[thread] = shared.values[thread ^ 31];",
                   .shape = {.block = 64},
                   .expected = lanes([](int t) { return (t ^ 31) * (t ^ 31); })});
  return cases;
}

inline WrapperCases block_cases() {
  WrapperCases cases;
  std::vector<unsigned> indices;
  for (unsigned z = 0; z < 2; ++z) {
    for (unsigned y = 0; y < 3; ++y) {
      for (unsigned x = 0; x < 2; ++x) {
        for (unsigned t = 0; t < 40; ++t) indices.insert(indices.end(), {t, x, y, z, 40, 2, 3, 2});
      }
    }
  }
  cases.push_back({.name = "indices",
                   .headers = {"memory"},
                   .body = "  unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;\n"
                           "  unsigned* to = (unsigned*)output + (block * 40 + thread) * 8;\n"
                           "  to[0] = threadIdx.x; to[1] = blockIdx.x; to[2] = blockIdx.y; to[3] = blockIdx.z;\n"
                           "  to[4] = blockDim.x; to[5] = gridDim.x; to[6] = gridDim.y; to[7] = gridDim.z;",
                   .shape = {.grid = {2, 3, 2}, .block = 40},
                   .expected = bytes_of(indices)});
  std::vector<int> reversed;
  for (int round = 0; round < 4; ++round) {
    for (int t = 0; t < 200; ++t) reversed.push_back((199 - t) * (round + 1));
  }
  cases.push_back({.name = "syncthreads",
                   .headers = {"shared"},
                   .storage = "  int values[200];",
                   .body =
                       "  for (int round = 0; round < 4; ++round) {\n"
                       "    shared.values[thread] = thread * (round + 1);\n    __syncthreads();\n"
                       "    ((int*)output)[round * 200 + thread] = shared.values[199 - thread];\n    __syncthreads();\n  }",
                   .shape = {.block = 200},
                   .expected = bytes_of(reversed)});
  std::vector<int> handed;
  for (int round = 0; round < 5; ++round) {
    for (int t = 0; t < 64; ++t) handed.push_back(round * 100 + t);
  }
  // Warps 0 and 1 produce, warps 2 and 3 consume: full is barrier 1, empty is barrier 2.
  cases.push_back({.name = "named_barriers",
                   .headers = {"barrier", "shared"},
                   .storage = "  int values[64];",
                   .body = "  for (int round = 0; round < 5; ++round) {\n"
                           "    if (thread < 64) {\n"
                           "      if (round > 0) ptx::barrier_sync(2, 128);\n"
                           "      shared.values[thread] = round * 100 + thread;\n"
                           "      ptx::barrier_arrive(1, 128);\n"
                           "    } else {\n"
                           "      ptx::barrier_sync(1, 128);\n"
                           "      ((int*)output)[round * 64 + thread - 64] = shared.values[thread - 64];\n"
                           "      if (round < 4) ptx::barrier_arrive(2, 128);\n"
                           "    }\n  }",
                   .shape = {.block = 128},
                   .expected = bytes_of(handed)});
  // Two warps meet where each is at its own place.
  std::vector<int> exchanged;
  for (int t = 0; t < 64; ++t) exchanged.push_back(t < 32 ? 2 * (t + 32) : t - 32);
  cases.push_back({.name = "barrier_apart",
                   .headers = {"barrier", "shared"},
                   .storage = "  int values[64];",
                   .body = "  if (thread < 32) {\n"
                           "    shared.values[thread] = thread;\n"
                           "    ptx::barrier_sync_apart(1, 64);\n"
                           "    ((int*)output)[thread] = shared.values[thread + 32];\n"
                           "  } else {\n"
                           "    shared.values[thread] = 2 * thread;\n"
                           "    ptx::barrier_sync_apart(1, 64);\n"
                           "    ((int*)output)[thread] = shared.values[thread - 32];\n"
                           "  }",
                   .shape = {.block = 64},
                   .expected = bytes_of(exchanged)});
  return cases;
}

}  // namespace flash_attention::testing
