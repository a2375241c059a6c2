#include <gtest/gtest.h>

#include "emulator/emulate.h"

// What the scheduler promises beside what single instructions do.
namespace flash_attention::testing {
namespace {

/// One warp polls a flag; the other sets it when a copy has landed. Nobody else is left to let time pass.
TEST(Scheduler, ACopyLandsWhileThreadsPoll) {
  const WrapperCase c{
      .name = "poll_for_a_copy",
      .headers = {"tma", "atomic"},
      .storage = "  alignas(128) unsigned values[32];\n  ptx::Mbarrier full;",
      .body =
          "  unsigned* flag = (unsigned*)output;\n"
          "  if (thread == 0) {\n    ptx::mbarrier_init(shared.full, 1);\n    ptx::mbarrier_init_fence();\n  }\n"
          "  __syncthreads();\n"
          "  if (thread == 0) {\n    ptx::mbarrier_arrive_expect_tx(shared.full, 128);\n"
          "    ptx::bulk_load(shared.values, input, 128, shared.full);\n  }\n"
          "  if (thread < 32) {\n    while (ptx::load_acquire(flag) == 0) {}\n"
          "  } else {\n    ptx::mbarrier_wait(shared.full, 0);\n"
          "    if (thread == 32) ptx::store_release(flag, shared.values[31]);\n  }",
      .arch = 90,
      .shape = {.block = 64},
      .input = bytes_of(std::vector<unsigned>(32, 7)),
      .expected = bytes_of(std::vector<unsigned>{7})};
  for (std::uint64_t seed = 0; seed < 8; ++seed) EXPECT_EQ(emulate(c, seed), c.expected) << "seed " << seed;
}

}  // namespace
}  // namespace flash_attention::testing
