#pragma once

#include <algorithm>

#include "emulator/cases/memory.h"

namespace flash_attention::testing {

inline WrapperCases mbarrier_cases() {
  WrapperCases cases;
  std::vector<int> sums;
  for (int round = 0; round < 6; ++round) {
    for (int t = 0; t < 32; ++t) sums.push_back(96 * (round * 100) + 4560);
  }
  // Warps 1 to 3 fill, one arrival a thread; warp 0 reads and frees, one arrival.
  cases.push_back(
      {.name = "mbarrier_phases",
       .headers = {"mbarrier"},
       .storage = "  int values[96];\n  ptx::Mbarrier full, empty;",
       .body = "  if (thread == 0) {\n    ptx::mbarrier_init(shared.full, 96);\n    ptx::mbarrier_init(shared.empty, 1);\n"
               "    ptx::mbarrier_init_fence();\n  }\n  __syncthreads();\n"
               "  for (int round = 0; round < 6; ++round) {\n"
               "    if (thread >= 32) {\n"
               "      ptx::mbarrier_wait(shared.empty, (round & 1) ^ 1);\n"
               "      shared.values[thread - 32] = round * 100 + thread - 32;\n"
               "      ptx::mbarrier_arrive(shared.full);\n"
               "    } else {\n"
               "      ptx::mbarrier_wait(shared.full, round & 1);\n"
               "      int sum = 0;\n      for (int i = 0; i < 96; ++i) sum += shared.values[i];\n"
               "      ((int*)output)[round * 32 + thread] = sum;\n      __syncwarp();\n"
               "      if (thread == 0) ptx::mbarrier_arrive(shared.empty);\n    }\n  }",
       .arch = 90,
       .shape = {.block = 128},
       .expected = bytes_of(sums)});
  // Looked at, again and again.
  cases.push_back({.name = "mbarrier_test",
                   .headers = {"mbarrier", "registers"},
                   .storage = "  int value;\n  ptx::Mbarrier full;",
                   .body =
                       "  if (thread == 0) {\n    ptx::mbarrier_init(shared.full, 1);\n    ptx::mbarrier_init_fence();\n"
                       "  }\n  __syncthreads();\n"
                       "  if (thread == 32) {\n    shared.value = 7 * ptx::fresh_grid_size();\n"
                       "    ptx::mbarrier_arrive(shared.full);\n  }\n"
                       "  if (thread < 32) {\n    while (!ptx::mbarrier_test(shared.full, 0)) {}\n"
                       "    ((int*)output)[thread] = shared.value;\n  }",
                   .arch = 90,
                   .shape = {.block = 64},
                   .expected = bytes_of(std::vector<int>(32, 7))});
  // By the one who is waited for: not even the second look waits.
  cases.push_back({.name = "mbarrier_test_before_arrival",
                   .headers = {"mbarrier"},
                   .storage = "  ptx::Mbarrier full;",
                   .body = "  if (thread != 0) return;\n"
                           "  ptx::mbarrier_init(shared.full, 1);\n  ptx::mbarrier_init_fence();\n"
                           "  for (int i = 0; i < 3; ++i) ((int*)output)[i] = ptx::mbarrier_test(shared.full, 0);\n"
                           "  ptx::mbarrier_arrive(shared.full);\n"
                           "  ((int*)output)[3] = ptx::mbarrier_test(shared.full, 0);",
                   .arch = 90,
                   .shape = {.block = 32},
                   .expected = bytes_of(std::vector<int>{0, 0, 0, 1})});
  return cases;
}

inline WrapperCases bulk_cases() {
  WrapperCases cases;
  const Bytes input = counting_bytes(4096);
  cases.push_back(
      {.name = "bulk_load",
       .headers = {"tma"},
       .storage = "  alignas(128) unsigned char bytes[4096];\n  ptx::Mbarrier full;",
       .body = "  if (thread == 0) {\n    ptx::mbarrier_init(shared.full, 1);\n    ptx::mbarrier_init_fence();\n  }\n"
               "  __syncthreads();\n"
               "  if (thread == 0) {\n    ptx::mbarrier_arrive_expect_tx(shared.full, 4096);\n"
               "    for (int i = 0; i < 4; ++i) ptx::bulk_load(shared.bytes + i * 1024, input + i * 1024, 1024, "
               "shared.full);\n  }\n"
               "  ptx::mbarrier_wait(shared.full, 0);\n"
               "  for (int i = thread; i < 4096; i += 64) output[i] = shared.bytes[i];",
       .arch = 90,
       .shape = {.block = 64},
       .input = input,
       .expected = input});
  std::vector<int> written;
  for (int i = 0; i < 128; ++i) written.push_back(3 * (i % 64));
  cases.push_back({.name = "bulk_load_of_what_was_stored",
                   .headers = {"tma", "fence"},
                   .storage = "  alignas(128) int values[64];\n  ptx::Mbarrier full;",
                   .body =
                       "  if (thread == 0) {\n    ptx::mbarrier_init(shared.full, 1);\n    ptx::mbarrier_init_fence();\n"
                       "    for (int i = 0; i < 64; ++i) ((int*)output)[i] = 3 * i;\n    ptx::fence_async_global();\n"
                       "    ptx::mbarrier_arrive_expect_tx(shared.full, 256);\n"
                       "    ptx::bulk_load(shared.values, output, 256, shared.full);\n  }\n  __syncthreads();\n"
                       "  ptx::mbarrier_wait(shared.full, 0);\n  ((int*)output)[64 + thread] = shared.values[thread];",
                   .arch = 90,
                   .shape = {.block = 64},
                   .expected = bytes_of(written)});
  // Two staging slots: the store two rounds back has been read before its slot is written again.
  std::vector<float> stored, added;
  for (int round = 0; round < 5; ++round) {
    for (int i = 0; i < 64; ++i) stored.push_back(static_cast<float>(round * 64 + i));
  }
  for (int i = 0; i < 64; ++i) added.push_back(static_cast<float>(1000 + 5 * i + 64 * 10));
  for (const std::string name : {"bulk_store", "bulk_reduce_add", "bulk_reduce_add_kept"}) {
    const bool add = name != "bulk_store";
    cases.push_back({.name = name,
                     .headers = {"tma", "fence"},
                     .storage = "  alignas(128) float slots[2][64];",
                     .body = std::string("  for (int round = 0; round < 5; ++round) {\n"
                                         "    if (thread == 0) ptx::bulk_wait_read<1>();\n    __syncthreads();\n"
                                         "    shared.slots[round % 2][thread] = round * 64 + thread;\n"
                                         "    ptx::fence_async_shared();\n    __syncthreads();\n"
                                         "    if (thread == 0) {\n") +
                             "      ptx::" + name + (add ? "((float*)output" : "((float*)output + round * 64") +
                             ", shared.slots[round % 2], 256);\n" +
                             "      ptx::bulk_commit();\n    }\n  }\n  if (thread == 0) ptx::bulk_wait<0>();",
                     .arch = 90,
                     .shape = {.block = 64},
                     .expected = bytes_of(add ? added : stored),
                     .before = add ? bytes_of(std::vector<float>(64, 1000.0f)) : Bytes{}});
  }
  return cases;
}

/// A box of a tensor as TMA lays it out: innermost first, swizzled, zeros outside.
struct BoxCase {
  const char* name;
  int rank;
  std::vector<int> sizes, box, at;
  int swizzle;
};

inline std::vector<BoxCase> tma_boxes() {
  return {{"4d", 4, {64, 11, 2, 3}, {64, 8, 2, 1}, {0, 4, 0, 2}, 128},
          {"4d_inside", 4, {64, 37, 1, 1}, {64, 16, 1, 1}, {0, 5, 0, 0}, 128},
          {"4d_past_the_end", 4, {64, 37, 1, 1}, {64, 16, 1, 1}, {0, 30, 0, 0}, 128},
          {"4d_before_the_beginning", 4, {64, 37, 1, 1}, {32, 16, 1, 1}, {-8, -3, 0, 0}, 64},
          {"4d_plain", 4, {40, 20, 1, 1}, {24, 8, 1, 1}, {24, 2, 0, 0}, 0},
          {"4d_swizzle_32", 4, {16, 9, 4, 1}, {16, 5, 2, 1}, {0, 6, 1, 0}, 32},
          {"5d", 5, {64, 10, 2, 3, 2}, {64, 8, 2, 1, 1}, {0, 7, 0, 1, 1}, 128}};
}

inline int elements_of(const std::vector<int>& sizes) {
  int count = 1;
  for (const int size : sizes) count *= size;
  return count;
}

/// Calls visit(index in the swizzled box, index in the tensor or -1) for each element of 2 bytes.
template <typename Visit>
void for_each_element(const BoxCase& b, Visit visit) {
  const int mask = b.swizzle == 128 ? 7 : b.swizzle == 64 ? 3 : b.swizzle == 32 ? 1 : 0;
  for (int i = 0; i < elements_of(b.box); ++i) {
    int rest = i, index = 0, stride = 1;
    bool inside = true;
    for (int d = 0; d < b.rank; ++d) {
      const int x = b.at[static_cast<std::size_t>(d)] + rest % b.box[static_cast<std::size_t>(d)];
      rest /= b.box[static_cast<std::size_t>(d)];
      inside = inside && x >= 0 && x < b.sizes[static_cast<std::size_t>(d)];
      index += x * stride;
      stride *= b.sizes[static_cast<std::size_t>(d)];
    }
    const int byte = 2 * i;
    visit((byte ^ ((byte >> 7 & mask) << 4)) / 2, inside ? index : -1);
  }
}

inline WrapperCase::Map map_of(const BoxCase& b, bool of_output) {
  WrapperCase::Map map{.of_output = of_output, .spec = {.rank = b.rank, .swizzle_bytes = b.swizzle}};
  std::uint64_t stride = 2;
  for (int d = 0; d < b.rank; ++d) {
    const auto i = static_cast<std::size_t>(d);
    map.spec.sizes[d] = static_cast<std::uint64_t>(b.sizes[i]);
    map.spec.box[d] = static_cast<std::uint32_t>(b.box[i]);
    stride *= map.spec.sizes[d];
    if (d + 1 < b.rank) map.spec.strides_bytes[d] = stride;
  }
  return map;
}

inline WrapperCases tma_cases() {
  WrapperCases cases;
  for (const BoxCase& b : tma_boxes()) {
    const auto tensor_size = static_cast<std::size_t>(elements_of(b.sizes)),
               box_size = static_cast<std::size_t>(elements_of(b.box));
    std::vector<std::uint16_t> tensor(tensor_size), loaded(box_size), stored(tensor_size), box(box_size);
    for (std::size_t i = 0; i < tensor_size; ++i) tensor[i] = static_cast<std::uint16_t>(i + 1);
    for (std::size_t i = 0; i < box_size; ++i) box[i] = static_cast<std::uint16_t>(7 * i + 1);
    for_each_element(b, [&](int in_box, int in_tensor) {
      loaded[static_cast<std::size_t>(in_box)] =
          in_tensor < 0 ? std::uint16_t{0} : tensor[static_cast<std::size_t>(in_tensor)];
      if (in_tensor >= 0) stored[static_cast<std::size_t>(in_tensor)] = box[static_cast<std::size_t>(in_box)];
    });
    std::string coordinates;
    for (const int x : b.at) coordinates += ", " + std::to_string(x);
    const std::string bytes = std::to_string(2 * box_size), d = std::to_string(b.rank) + "d";
    const std::string storage = "  alignas(1024) unsigned char box[" + bytes + "];\n  ptx::Mbarrier full;";
    const auto add_load = [&](const std::string& name, const std::string& call) {
      cases.push_back(
          {.name = name + "_" + b.name,
           .headers = {"tma"},
           .storage = storage,
           .body = "  if (thread == 0) {\n    ptx::mbarrier_init(shared.full, 1);\n    ptx::mbarrier_init_fence();\n"
                   "    ptx::tma_prefetch(args.maps[0]);\n"
                   "    ptx::mbarrier_arrive_expect_tx(shared.full, " +
                   bytes +
                   ");\n"
                   "    ptx::" +
                   call + coordinates +
                   ");\n  }\n"
                   "  __syncthreads();\n  ptx::mbarrier_wait(shared.full, 0);\n"
                   "  for (int i = thread; i < " +
                   bytes + "; i += 64) output[i] = shared.box[i];",
           .arch = 90,
           .shape = {.block = 64},
           .input = bytes_of(tensor),
           .expected = bytes_of(loaded),
           .maps = {map_of(b, false)}});
    };
    add_load("tma_load", "tma_load_" + d + "(shared.box, args.maps[0], shared.full");
    if (b.rank == 4)
      add_load("tma_load_policy", "tma_load_policy_4d(shared.box, args.maps[0], shared.full, ptx::l2_evict_first()");
    // A store that begins before the tensor stops an H200 with an illegal instruction; a load there is fine.
    if (std::any_of(b.at.begin(), b.at.end(), [](int x) { return x < 0; })) continue;
    cases.push_back({.name = std::string("tma_store_") + b.name,
                     .headers = {"tma", "fence"},
                     .storage = storage,
                     .body = "  for (int i = thread; i < " + bytes +
                             "; i += 64) shared.box[i] = input[i];\n"
                             "  ptx::fence_async_shared();\n  __syncthreads();\n"
                             "  if (thread == 0) {\n    ptx::tma_store_" +
                             d + "(args.maps[0], shared.box" + coordinates +
                             ");\n"
                             "    ptx::bulk_commit();\n    ptx::bulk_wait<0>();\n  }",
                     .arch = 90,
                     .shape = {.block = 64},
                     .input = bytes_of(box),
                     .expected = bytes_of(stored),
                     .maps = {map_of(b, true)}});
  }
  return cases;
}

}  // namespace flash_attention::testing
