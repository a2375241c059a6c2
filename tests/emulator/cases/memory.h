#pragma once

#include <algorithm>

#include "emulator/cases/values.h"
#include "emulator/wrapper_case.h"

namespace flash_attention::testing {

inline Bytes counting_bytes(std::size_t count) {
  Bytes bytes(count);
  for (std::size_t i = 0; i < count; ++i) bytes[i] = static_cast<unsigned char>(i * 37 + i / 256);
  return bytes;
}

inline std::vector<unsigned> largest_words() {
  std::vector<unsigned> largest(2);
  for (unsigned thread = 0; thread < 64; ++thread)
    largest[thread % 2] = std::max(largest[thread % 2], thread * 0x9E3779B9u >> 8);
  return largest;
}

inline std::vector<unsigned> least_words() {
  std::vector<unsigned> least(2, 0xffffffffu);
  for (unsigned thread = 0; thread < 64; ++thread)
    least[thread % 2] = std::min(least[thread % 2], (thread + 1) * 0x9E3779B9u >> 8);
  return least;
}

inline WrapperCases memory_cases() {
  WrapperCases cases;
  // Every width moves global -> shared -> global, each thread one element, the order reversed in shared memory.
  const struct {
    const char* name;
    const char* type;
    std::size_t bytes;
  } widths[] = {{"b16", "unsigned short", 2},
                {"b32", "float", 4},
                {"b64", "ptx::Vector<float, 2>", 8},
                {"b128", "ptx::Vector<float, 4>", 16}};
  for (const auto& width : widths) {
    const Bytes input = counting_bytes(64 * width.bytes);
    Bytes reversed;
    for (std::size_t t = 0; t < 64; ++t) {
      const auto from = input.begin() + static_cast<std::ptrdiff_t>((63 - t) * width.bytes);
      reversed.insert(reversed.end(), from, from + static_cast<std::ptrdiff_t>(width.bytes));
    }
    for (const char* load : {"load_global", "load_readonly"}) {
      cases.push_back({.name = std::string(load) + "_" + width.name,
                       .headers = {"memory"},
                       .storage = "  alignas(16) unsigned char bytes[1024];",
                       .body = std::string("  using T = ") + width.type +
                               ";\n  const T* from = (const T*)input;\n"
                               "  const unsigned base = ptx::shared_address(shared.bytes);\n"
                               "  ptx::store_shared<T>(base + (63 - thread) * sizeof(T), ptx::" +
                               load +
                               "(from + thread));\n"
                               "  __syncthreads();\n"
                               "  ptx::store_global((T*)output + thread, ptx::load_shared<T>(base + thread * sizeof(T)));",
                       .shape = {.block = 64},
                       .input = input,
                       .expected = reversed});
    }
  }
  std::vector<int> numbers(64);
  for (int i = 0; i < 64; ++i) numbers[static_cast<std::size_t>(i)] = i;
  cases.push_back(
      {.name = "griddepcontrol_wait",
       .headers = {"launch"},
       .body =
           "  ptx::griddepcontrol_launch_dependents();\n  ptx::griddepcontrol_wait();\n  ((int*)output)[thread] = thread;",
       .arch = 90,
       .shape = {.block = 64},
       .expected = bytes_of(numbers)});
  cases.push_back({.name = "prefetch_L2",
                   .headers = {"memory"},
                   .body = "  const float* from = (const float*)input + thread;\n  ptx::prefetch_L2(from);\n"
                           "  ((float*)output)[thread] = *from;",
                   .shape = {.block = 32},
                   .input = counting_bytes(128),
                   .expected = counting_bytes(128)});
  cases.push_back({.name = "reduce_add",
                   .headers = {"atomic"},
                   .body = "  ptx::reduce_add((float*)output + thread % 4, thread + 1.0f);",
                   .shape = {.grid = {8, 1, 1}, .block = 64},
                   .expected = bytes_of(std::vector<float>{8 * 496, 8 * 512, 8 * 528, 8 * 544})});
  cases.push_back({.name = "reduce_add_vector",
                   .headers = {"atomic"},
                   .body = "  ptx::reduce_add((float*)output, ptx::Vector<float, 4>{{1.0f, 2.0f, 3.0f, float(thread)}});",
                   .arch = 90,
                   .shape = {.grid = {8, 1, 1}, .block = 64},
                   .expected = bytes_of(std::vector<float>{512, 1024, 1536, 8 * 2016})});
  cases.push_back({.name = "reduce_max",
                   .headers = {"atomic"},
                   .body = "  ptx::reduce_max((unsigned*)output + thread % 2, thread * 0x9E3779B9u >> 8);",
                   .shape = {.grid = {4, 1, 1}, .block = 64},
                   .expected = bytes_of(largest_words())});
  cases.push_back({.name = "reduce_min",  // of words that begin as 0
                   .headers = {"atomic"},
                   .body = "  unsigned* to = (unsigned*)output + thread % 2;\n"
                           "  if (thread < 2) ptx::reduce_max(to, 0xffffffffu);\n  __syncthreads();\n"
                           "  ptx::reduce_min(to, (thread + 1) * 0x9E3779B9u >> 8);",
                   .shape = {.block = 64},
                   .expected = bytes_of(least_words())});
  std::vector<unsigned> tickets(512);
  for (unsigned i = 0; i < 512; ++i) tickets[i] = 1;
  tickets.push_back(512);
  cases.push_back(
      {.name = "atomic_add",
       .headers = {"atomic"},
       .body = "  unsigned* to = (unsigned*)output;\n"
               "  unsigned ticket = thread % 2 ? ptx::atomic_add(to + 512, 1) : ptx::atomic_add_acq_rel(to + 512, 1);\n"
               "  to[ticket] += 1;",
       .shape = {.grid = {8, 1, 1}, .block = 64},
       .expected = bytes_of(tickets)});
  // The first to find another number than its own puts it there; from then on everyone adds.
  cases.push_back({.name = "compare_exchange",
                   .headers = {"atomic"},
                   .body = "  auto* word = (unsigned long long*)output;\n"
                           "  const unsigned long long start = 77ull << 40, found = ptx::load_relaxed(word);\n"
                           "  if (found < start) ptx::compare_exchange(word, found, start);\n"
                           "  ptx::atomic_add_acq_rel(word, 3ull);",
                   .shape = {.grid = {8, 1, 1}, .block = 64},
                   .expected = bytes_of(std::vector<unsigned long long>{(77ull << 40) + 3 * 512})});
  // Each block waits for the one before it: values add up in order.
  cases.push_back({.name = "release_acquire",
                   .headers = {"atomic", "fence"},
                   .body = "  unsigned* to = (unsigned*)output;\n  if (thread != 0) return;\n"
                           "  while (ptx::load_acquire(to) != blockIdx.x) {}\n"
                           "  to[1] = to[1] * 3 + blockIdx.x;\n"
                           "  ptx::store_release(to, blockIdx.x + 1);",
                   .shape = {.grid = {6, 1, 1}, .block = 32},
                   .expected = bytes_of(std::vector<unsigned>{6, ((((0 * 3 + 1) * 3 + 2) * 3 + 3) * 3 + 4) * 3 + 5})});
  return cases;
}

inline WrapperCases copy_async_cases() {
  WrapperCases cases;
  const Bytes input = counting_bytes(64 * 16);
  for (const int bytes : {4, 8, 16}) {
    Bytes expected;
    for (int t = 0; t < 64; ++t) {
      const int valid = t % 3 == 0 ? bytes : t % 3 == 1 ? bytes / 2 : 0;
      for (int i = 0; i < bytes; ++i) expected.push_back(i < valid ? input[static_cast<std::size_t>(t * bytes + i)] : 0);
    }
    const std::string copy = bytes == 16 ? "copy_async" : "copy_async_small<" + std::to_string(bytes) + ">";
    const std::string n = std::to_string(bytes);
    cases.push_back({.name = "copy_async_" + n,
                     .headers = {"async"},
                     .storage = "  alignas(16) unsigned char bytes[64 * 16];",
                     .body = "  const int valid = thread % 3 == 0 ? " + n + " : thread % 3 == 1 ? " + n +
                             " / 2 : 0;\n"
                             "  ptx::" +
                             copy + "(ptx::shared_address(shared.bytes + thread * " + n + "), input + thread * " + n +
                             ", valid);\n  ptx::copy_async_commit();\n  ptx::copy_async_wait<0>();\n  __syncthreads();\n"
                             "  for (int i = thread; i < 64 * " +
                             n + "; i += 64) output[i] = shared.bytes[i];",
                     .shape = {.block = 64},
                     .input = input,
                     .expected = expected});
  }
  // A ring of three slots: the group two back is waited for.
  const Bytes stream = counting_bytes(16 * 32 * 10);
  cases.push_back(
      {.name = "copy_async_groups",
       .headers = {"async"},
       .storage = "  alignas(16) unsigned char slots[3][32 * 16];",
       .body =
           "  auto start = [&](int i) {\n"
           "    if (i < 10) ptx::copy_async(ptx::shared_address(shared.slots[i % 3] + thread * 16),\n"
           "                                input + (i * 32 + thread) * 16);\n"
           "    ptx::copy_async_commit();\n  };\n"
           "  start(0); start(1);\n"
           "  for (int i = 0; i < 10; ++i) {\n"
           "    ptx::copy_async_wait<1>();\n    __syncwarp();\n    start(i + 2);\n"
           "    for (int b = 0; b < 16; ++b) output[i * 512 + b * 32 + thread] = shared.slots[i % 3][b * 32 + thread];\n"
           "    __syncwarp();\n  }",
       .shape = {.block = 32},
       .input = stream,
       .expected = stream});
  // The copies signal an mbarrier; nobody waits for them by group.
  const Bytes rounds = counting_bytes(16 * 64 * 4);
  cases.push_back({.name = "copy_async_arrive",
                   .headers = {"async", "mbarrier"},
                   .storage = "  ptx::Mbarrier full;\n  alignas(16) unsigned char bytes[64 * 16];",
                   .body = "  if (thread == 0) ptx::mbarrier_init(shared.full, 64);\n"
                           "  __syncthreads();\n"
                           "  for (int round = 0; round < 4; ++round) {\n"
                           "    ptx::copy_async(ptx::shared_address(shared.bytes + thread * 16),\n"
                           "                    input + (round * 64 + thread) * 16);\n"
                           "    ptx::copy_async_arrive(shared.full);\n"
                           "    ptx::mbarrier_wait(shared.full, round % 2);\n"
                           "    for (int b = 0; b < 16; ++b)\n"
                           "      output[round * 1024 + b * 64 + thread] = shared.bytes[b * 64 + thread];\n"
                           "    __syncthreads();\n  }",
                   .arch = 90,
                   .shape = {.block = 64},
                   .input = rounds,
                   .expected = rounds});
  return cases;
}

}  // namespace flash_attention::testing
