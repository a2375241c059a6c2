#include "api/watchdog.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include "flash_attention/runtime.h"
#include "support/cases/contract.h"
#include "support/cases/programs.h"
#include "support/oracle/tensors.h"

namespace flash_attention::testing {
namespace {

// Before anything reads the settings.
const bool checked = ::setenv("FLASH_ATTENTION_CHECK", "1", 1) == 0;

/// Runs a case on the CPU; in backward after the oracle's forward pass. Returns the error's text; empty without an error.
std::string run(const Case& c, Pass pass, const std::string& kernel = "") {
  const bool gradients = pass == Pass::backward;
  const Inputs in = draw_inputs(c);
  const auto memory = memory_of({});
  Tensors tensors(c, in, *memory);
  Results exact = oracle(c, in, false);
  if (gradients) tensors.set_forward(exact);
  Options options{.seed = c.dropout_seed, .offset = c.dropout_offset, .kernel = kernel};
  options.workspace_bytes = workspace_bytes(c.problem, pass, options);
  if (options.workspace_bytes > 0) options.workspace = memory->allocate(options.workspace_bytes);
  Buffers b = tensors.buffers();
  if (!gradients) b.dout = nullptr, b.dlse = nullptr, b.dq = b.dk = b.dv = b.dbias = nullptr, b.dsink = nullptr;
  try {
    (gradients ? backward : forward)(c.problem, b, options);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::internal) << error.what();
    return error.what();
  }
  return "";
}

using Watchdog = ::testing::TestWithParam<Case>;

TEST_P(Watchdog, LeavesRightCallsAlone) {
  ASSERT_TRUE(checked);
  const Problem& p = GetParam().problem;
  const bool of_caches = p.bit_mask.kind != BitMaskKind::none || p.sequence_windows;
  const bool cached = p.page_size != 0 || p.left_padding || p.latent || of_caches;
  EXPECT_EQ(run(GetParam(), Pass::forward), "");
  EXPECT_EQ(cached ? "" : run(GetParam(), Pass::backward), "");
}

INSTANTIATE_TEST_SUITE_P(Float32, Watchdog, ::testing::ValuesIn(contract_cases(Dtype::float32)), case_name);
INSTANTIATE_TEST_SUITE_P(Float16, Watchdog, ::testing::ValuesIn(some_of(contract_cases(Dtype::float16))), case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, Watchdog, ::testing::ValuesIn(some_of(contract_cases(Dtype::bfloat16))), case_name);
INSTANTIATE_TEST_SUITE_P(Masks, Watchdog, ::testing::ValuesIn(mask_cases(Dtype::bfloat16)), case_name);
INSTANTIATE_TEST_SUITE_P(Cache, Watchdog, ::testing::ValuesIn(cache_cases(Dtype::bfloat16)), case_name);
INSTANTIATE_TEST_SUITE_P(Bits, Watchdog, ::testing::ValuesIn(bit_cases(Dtype::bfloat16)), case_name);
INSTANTIATE_TEST_SUITE_P(Latent, Watchdog, ::testing::ValuesIn(latent_cases(Dtype::bfloat16)), case_name);

TEST(WatchdogOfPrograms, LeavesRightCallsAlone) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    const RandomProgram random(seed, seed % 4 != 1, seed % 4 != 2);
    Problem problem{.batch = 2, .seq_q = 29, .seq_kv = 70, .heads_q = 2, .heads_kv = 1, .head_dim = 16};
    problem.dtype = seed % 2 == 0 ? Dtype::float32 : Dtype::float16;
    problem.causal = seed % 3 == 0;
    EXPECT_NO_THROW(run_program(problem, random, {}, seed)) << random.text << "seed " << seed;
  }
}

/// Leaves out the last part of the work, as a kernel with one block too few would.
void lazy_for(void*, std::int64_t count, void (*body)(void*, std::int64_t), void* context) {
  for (std::int64_t i = 0; i + 1 < count; ++i) body(context, i);
}

struct WithLazyThreads {
  WithLazyThreads() { set_parallel_for(lazy_for, nullptr, 2); }
  ~WithLazyThreads() { set_parallel_for(nullptr, nullptr, 0); }
};

Case large(Dtype dtype) {
  Case c;
  c.name = "large";
  c.problem = {.batch = 2, .seq_q = 300, .seq_kv = 300, .heads_q = 4, .heads_kv = 2, .head_dim = 64, .dtype = dtype};
  c.problem.causal = true;
  return c;
}

TEST(WatchdogCatches, AKernelThatLeavesOutWork) {
  for (const Dtype dtype : {Dtype::float32, Dtype::float16, Dtype::bfloat16}) {
    const Case c = large(dtype);
    EXPECT_EQ(run(c, Pass::forward), "");
    EXPECT_EQ(run(c, Pass::backward), "");
    const WithLazyThreads lazy;
    const std::string text = run(c, Pass::forward);
    for (const char* part : {"FLASH_ATTENTION_CHECK: cpu/", " differs from fp64 in ", "[batch 1, query ", ": got ",
                             ", expected ", "; forward of ", "seq 300"}) {
      EXPECT_NE(text.find(part), std::string::npos) << part << " is not in: " << text;
    }
    EXPECT_NE(run(c, Pass::backward).find("; backward of "), std::string::npos) << to_string(dtype);
  }
}

}  // namespace
}  // namespace flash_attention::testing
