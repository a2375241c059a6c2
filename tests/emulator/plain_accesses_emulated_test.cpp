#include <gtest/gtest.h>

#include "emulator/checks/counters.h"
#include "emulator/host/module.h"
#include "flash_attention/error.h"

// Accesses that no ptx:: wrapper makes, in units that ask for them to be counted.

namespace flash_attention::testing {
namespace {

/// A warp runs the body: `in` and `out` are global memory, `shared` is 8 KiB of shared memory.
emulator::Counters count(const std::string& name, const std::string& body, bool plain = true) {
  jit::Unit unit{name, "test_plain_" + name, {}, 80, plain};
  unit.text =
      "#include \"ptx/memory.cuh\"\nusing namespace flash_attention;\n"
      "struct Storage { float values[2048]; };\n"
      "struct Arguments { const float* in; float* out; };\n"
      "extern \"C\" __global__ void kernel(Arguments arguments) {\n"
      "  const float* in = arguments.in;\n  float* out = arguments.out;\n"
      "  float* shared = ptx::shared_storage<Storage>().values;\n"
      "  const int thread = threadIdx.x;\n" +
      body + "\n}\n";
  struct alignas(512) Memory {
    float values[4096];
  };
  static Memory input, output;
  struct {
    const float* in;
    float* out;
  } arguments{input.values, output.values};
  const auto module = emulator::load_module(unit);
  const bool before = emulator::count_accesses(true);
  emulator::reset_counters();
  emulator::run_grid(*module, {.block = 32, .shared_bytes = 8192}, &arguments);
  emulator::count_accesses(before);
  return emulator::counters();
}

TEST(PlainAccesses, AreCountedWhereAskedFor) {
  const std::string body = "  out[thread] = in[thread] + in[thread + 64];";
  const emulator::Counters counted = count("asked", body);
  EXPECT_EQ(counted.global_requests, 3u);
  EXPECT_EQ(counted.global_sectors, 12u);
  EXPECT_EQ(counted.shared_requests, 0u);
  EXPECT_EQ(count("not_asked", body, false).global_requests, 0u);
}

TEST(PlainAccesses, StridesTouchMoreSectors) {
  EXPECT_EQ(count("strided", "  out[thread * 8] = in[thread * 64];").global_sectors, 64u);
  EXPECT_EQ(count("same", "  out[thread] = in[5];").global_sectors, 5u);
}

TEST(PlainAccesses, VectorsAreOneAccess) {
  const auto counted =
      count("vector", "  reinterpret_cast<float4*>(out)[thread] = reinterpret_cast<const float4*>(in)[thread];");
  EXPECT_EQ(counted.global_requests, 2u);
  EXPECT_EQ(counted.global_sectors, 32u);
}

TEST(PlainAccesses, SharedMemoryHasItsBanks) {
  const auto counted = count("shared", "  shared[thread * 32] = 1;\n  __syncthreads();\n  out[thread] = shared[thread];");
  EXPECT_EQ(counted.shared_requests, 2u);
  EXPECT_EQ(counted.shared_wavefronts, 33u);
  EXPECT_EQ(counted.shared_wavefronts_ideal, 2u);
  EXPECT_EQ(counted.global_requests, 1u);
}

TEST(PlainAccesses, WrappersAreCountedOnceAndLocalsNever) {
  const auto counted = count("mixed",
                             "  volatile float local[4] = {1, 2, 3, 4};\n"
                             "  ptx::store_global(out + thread, ptx::load_global(in + thread) + local[thread % 4]);");
  EXPECT_EQ(counted.global_requests, 2u);
}

}  // namespace
}  // namespace flash_attention::testing
