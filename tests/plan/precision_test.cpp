// Which problems the kernels of float32 get, on GPUs from sm_80 on: tf32, and fp32 where precision is ieee.
#include <gtest/gtest.h>

#include "flash_attention/error.h"
#include "flash_attention/plan.h"

namespace flash_attention {
namespace {

DeviceInfo gpu(int arch, int shared_bytes) {
  return {.device = {.kind = DeviceKind::cuda}, .arch = arch, .num_sms = 132, .shared_bytes = shared_bytes};
}
const DeviceInfo hopper = gpu(90, 232448), ampere = gpu(80, 166912), ada = gpu(89, 101376), turing = gpu(75, 65536);

Problem fast_problem(std::int64_t head_dim = 64) {
  return {.batch = 2, .seq_q = 512, .seq_kv = 512, .heads_q = 4, .heads_kv = 4, .head_dim = head_dim};
}

std::string kernel_of(const Problem& problem, Pass pass, const DeviceInfo& device) {
  return make_plan(problem, pass, device).kernel;
}

TEST(PlanPrecision, OnlyIeeeTakesNoTensorCores) {
  Problem problem = fast_problem();
  for (const Precision precision : {Precision::automatic, Precision::fast, Precision::tf32, Precision::ieee}) {
    problem.precision = precision;
    const std::string name = precision == Precision::ieee ? "fp32" : "tf32";
    EXPECT_EQ(kernel_of(problem, Pass::forward, hopper), "forward/" + name) << to_string(precision);
    EXPECT_EQ(kernel_of(problem, Pass::backward, hopper), "backward/" + name) << to_string(precision);
  }
  EXPECT_EQ(Problem{}.precision, Precision::automatic);
}

/// Packed sequences, pages and single queries are multiplied like all others.
TEST(PlanPrecision, EveryKindOfCallHasIt) {
  Problem packed = fast_problem(), paged = fast_problem(), decode = fast_problem();
  packed.packed = true, packed.total_q = packed.total_kv = 700;
  paged.page_size = 64, paged.num_pages = 16, paged.seqused_kv = true;
  decode.seq_q = 1, decode.seqused_kv = true;
  for (const Problem& problem : {packed, paged, decode}) {
    EXPECT_EQ(kernel_of(problem, Pass::forward, hopper), "forward/tf32") << to_string(problem);
  }
  EXPECT_EQ(kernel_of(packed, Pass::backward, hopper), "backward/tf32");
}

TEST(PlanPrecision, FastFloat32TakesTensorCores) {
  for (const DeviceInfo& device : {hopper, ampere, ada}) {
    for (const std::int64_t head_dim : {8, 64, 128, 256})
      EXPECT_EQ(kernel_of(fast_problem(head_dim), Pass::forward, device), "forward/tf32") << head_dim;
    EXPECT_EQ(kernel_of(fast_problem(32), Pass::backward, device), "backward/tf32");
  }
  EXPECT_EQ(kernel_of(fast_problem(128), Pass::backward, ampere), "backward/tf32");
  EXPECT_EQ(kernel_of(fast_problem(192), Pass::backward, hopper), "backward/tf32");
}

TEST(PlanPrecision, ElsewhereItIsWithoutEffect) {
  Problem problem = fast_problem();
  EXPECT_EQ(kernel_of(problem, Pass::forward, turing), "forward/portable");
  EXPECT_EQ(kernel_of(problem, Pass::backward, turing), "backward/portable");
  problem.dtype = Dtype::bfloat16;
  EXPECT_EQ(kernel_of(problem, Pass::forward, hopper), "forward/sm90");
  problem.precision = Precision::ieee;
  problem.dtype = Dtype::float32;
  EXPECT_EQ(kernel_of(problem, Pass::forward, turing), "forward/portable");
  EXPECT_EQ(kernel_of(problem, Pass::backward, turing), "backward/portable");
}

TEST(PlanPrecision, WhatFp32DoesNotTakeIsPortable) {
  Problem deterministic = fast_problem(128), odd = fast_problem(60), invariant = fast_problem(), wide = fast_problem(512);
  deterministic.deterministic = true, invariant.invariant = true;
  for (Problem* problem : {&deterministic, &odd, &invariant, &wide}) problem->precision = Precision::ieee;
  EXPECT_EQ(kernel_of(deterministic, Pass::forward, hopper), "forward/fp32");
  EXPECT_EQ(kernel_of(deterministic, Pass::backward, hopper), "backward/fp32");
  for (const Problem& problem : {odd, invariant, wide})
    EXPECT_EQ(kernel_of(problem, Pass::forward, hopper), "forward/portable");
}

TEST(PlanPrecision, WhatTensorCoresDoNotTakeIsDoneInFp32) {
  Problem negative = fast_problem(), odd = fast_problem(), invariant = fast_problem(), wide = fast_problem(512);
  negative.scale = -0.5f;
  odd.q_strides = {.batch = 512 * 4 * 65, .seq = 4 * 65, .head = 65};
  invariant.invariant = true;
  for (const Problem& problem : {negative, odd, invariant, wide})
    EXPECT_EQ(kernel_of(problem, Pass::forward, hopper), "forward/portable");
  EXPECT_EQ(kernel_of(fast_problem(256), Pass::backward, hopper), "backward/portable");
}

TEST(PlanPrecision, FourElementsMoveAtOnce) {
  Problem problem = fast_problem();
  problem.k_strides = {.batch = 512 * 4 * 68, .seq = 4 * 68, .head = 68};
  EXPECT_EQ(kernel_of(problem, Pass::forward, hopper), "forward/tf32");
}

TEST(PlanPrecision, NameIsRefusedWithoutIt) {
  Problem problem = fast_problem();
  problem.precision = Precision::ieee;
  try {
    make_plan(problem, Pass::forward, hopper, "forward/tf32");
    FAIL() << "taken";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("precision = ieee"), std::string::npos) << error.what();
  }
}

TEST(PlanPrecision, OtherValuesAreRefusedByName) {
  Problem problem = fast_problem();
  problem.precision = static_cast<Precision>(4);
  try {
    make_plan(problem, Pass::forward, hopper);
    FAIL() << "taken";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("precision: got 4; allowed are ieee, fast, automatic and tf32"),
              std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace flash_attention
