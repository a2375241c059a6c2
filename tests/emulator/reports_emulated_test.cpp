#include <gtest/gtest.h>

#include "emulator/emulate.h"
#include "emulator/wrapper_cases.h"
#include "flash_attention/error.h"

// What a person reads when a kernel is wrong: kernel, seed, block, thread, instruction, and for a dead-lock who waits
// where.
namespace flash_attention::testing {
namespace {

std::string error_of(const WrapperCase& c) {
  try {
    emulate(c, 3);
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

void expect_parts(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts)
    EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in:\n" << text;
}

TEST(Reports, DeadLockAtABarrier) {
  const std::string text = error_of({.name = "half_a_barrier",
                                     .headers = {"barrier"},
                                     .body = "  if (blockIdx.x == 1 && thread >= 64) return;\n  ptx::barrier_sync(3, 128);",
                                     .shape = {.grid = {2, 1, 1}, .block = 128}});
  expect_parts(text,
               {"half_a_barrier", "seed 3", "dead-lock", "block (1, 0, 0)",
                "threads 0 to 63: barrier_sync, barrier 3 (64 of 128 threads have come)", "threads 64 to 127: has ended"});
}

TEST(Reports, DeadLockAtAnMbarrier) {
  const std::string text = error_of({.name = "missing_bytes",
                                     .headers = {"mbarrier"},
                                     .storage = "  unsigned long long unused;\n  ptx::Mbarrier full;",
                                     .body = "  if (thread == 0) ptx::mbarrier_init(shared.full, 2);\n  __syncthreads();\n"
                                             "  if (thread == 0) ptx::mbarrier_arrive_expect_tx(shared.full, 64);\n"
                                             "  ptx::mbarrier_wait(shared.full, 0);",
                                     .shape = {.block = 32}});
  expect_parts(text, {"threads 0 to 31", "mbarrier at shared offset 8, parity 0", "1 of 2 arrivals, 64 bytes expected"});
}

TEST(Reports, DeadLockInAWarp) {
  const std::string text = error_of({.name = "missing_lane",
                                     .headers = {"warp"},
                                     .body = "  if (thread != 5) ptx::ballot(true);",
                                     .shape = {.block = 32}});
  expect_parts(text, {"threads 0 to 4: ballot (31 of 32 lanes have come)", "thread 5: has ended"});
}

TEST(Reports, DeadLockOverRegisters) {
  const std::string text =
      error_of({.name = "too_many_registers",
                .headers = {"registers"},
                .body = "  if (thread < 128) ptx::registers_decrease<32>(); else ptx::registers_increase<240>();",
                .shape = {.block = 384}});
  expect_parts(text, {"registers_increase to 240 (the pool has too few)"});
}

TEST(Reports, RegistersThatFit) {
  EXPECT_EQ(error_of({.name = "enough_registers",
                      .headers = {"registers"},
                      .body = "  if (thread < 128) ptx::registers_decrease<24>(); else ptx::registers_increase<240>();",
                      .shape = {.block = 384}}),
            "no error");
}

TEST(Reports, CopiesThatNobodyWaitedFor) {
  WrapperCase c{.name = "copy_at_the_end",
                .headers = {"async", "shared"},
                .storage = "  alignas(16) unsigned char bytes[512];",
                .body =
                    "  ptx::copy_async(ptx::shared_address(shared.bytes) + 16 * thread, input + 16 * thread);\n"
                    "  ptx::copy_async_commit();\n  WAIT",
                .shape = {.block = 32},
                .input = Bytes(512)};
  const auto with = [&](const std::string& wait) {
    WrapperCase changed = c;
    changed.body.replace(changed.body.find("WAIT"), 4, wait);
    return error_of(changed);
  };
  EXPECT_EQ(with("ptx::copy_async_wait<0>();"), "no error");
  expect_parts(with("ptx::copy_async_wait<1>();"),
               {"copy_at_the_end", "thread 0", "ended while its copies were in flight"});
}

TEST(Reports, AMistakeNamesItsThread) {
  const std::string text =
      error_of({.name = "one_bad_thread",
                .headers = {"memory"},
                .body = "  ptx::load_global((const float*)(input + (thread == 70 && blockIdx.x == 2 ? 2 : 0)));",
                .shape = {.grid = {4, 1, 1}, .block = 96},
                .input = Bytes(64)});
  expect_parts(text, {"one_bad_thread", "block (2, 0, 0), thread 70, load_global"});
}

TEST(Reports, SharedMemoryThatWasNotLaunchedWith) {
  WrapperCase c{.name = "too_little_shared",
                .headers = {"shared"},
                .storage = "  float values[1000];",
                .body = "  shared.values[0] = 1;"};
  c.shape.shared_bytes = 256;
  expect_parts(error_of(c), {"larger than the shared memory the block was launched with"});
}

TEST(Reports, ACompilerErrorCarriesItsLog) {
  try {
    emulate({.name = "not_cpp", .headers = {"memory"}, .body = "  this is not C++;"}, 0);
    FAIL() << "it compiled";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::compile_failed);
    expect_parts(error.what(), {"not_cpp", ".cpp", "error:"});
  }
}

}  // namespace
}  // namespace flash_attention::testing
