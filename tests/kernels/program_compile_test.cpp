#include <gtest/gtest.h>

#include "support/compile.h"
#include "support/long_tail.h"

namespace flash_attention::testing {
namespace {

// Distances as a bias in documents, with all that a program can need: tensors of each type, a number, a gradient.
Problem problem_with_program(Dtype dtype) {
  Problem problem{.batch = 2, .seq_q = 1024, .seq_kv = 1024, .heads_q = 8, .heads_kv = 8, .head_dim = 128, .dtype = dtype};
  problem.program =
      "t0 = tensor float32 1\nt1 = tensor int64 2\ns0 = scalar int\n"
      "d = sub i j\nf = float d\na = max f 0.0\nx = load t0 h\ny = mul a x\nz = sub score y\n"
      "p = load t1 b i\nq = load t1 b j\nsame = eq p q\nnear = le d s0\nshown = and same near\n"
      "score = z\nvisible = shown";
  problem.program_sizes[0] = {8, 0, 0, 0};
  problem.program_sizes[1] = {2, 1024, 0, 0};
  problem.program_gradients = 1;
  return problem;
}

void expect_compile(Pass pass, const char* kernel, Dtype dtype, int arch) {
  if (const std::string reason = why_no_compiler(); !reason.empty()) GTEST_SKIP() << reason;
  const DeviceInfo device{
      .device = {.kind = DeviceKind::cuda}, .arch = arch, .num_sms = 108, .shared_bytes = shared_limit(arch)};
  Problem problem = problem_with_program(dtype);
  if (pass == Pass::forward) problem.program_gradients = 0;
  expect_plan_compiles(make_plan(problem, pass, device, kernel), arch);
}

TEST(ProgramCompile, Portable) {
  if (with_long_tail()) expect_compile(Pass::forward, "forward/portable", Dtype::float32, 75);
  expect_compile(Pass::backward, "backward/portable", Dtype::float32, 75);
}

TEST(ProgramCompile, Sm80) {
  expect_compile(Pass::forward, "forward/sm80", Dtype::bfloat16, 80);
  expect_compile(Pass::backward, "backward/sm80", Dtype::bfloat16, 80);
}

TEST(ProgramCompile, Sm90) {
  expect_compile(Pass::forward, "forward/sm90", Dtype::bfloat16, 90);
  expect_compile(Pass::backward, "backward/sm90", Dtype::bfloat16, 90);
}

// Programs of several sizes at each head dimension with tiles of its own: none may spill. One of its own is in Sm90.
TEST(ProgramCompile, Sm90Tiles) {
  if (!with_long_tail()) GTEST_SKIP() << "long tail";
  if (const std::string reason = why_no_compiler(); !reason.empty()) GTEST_SKIP() << reason;
  const char* const bent = "x = div score 20.0\ny = tanh x\nz = mul y 30.0\nscore = z";
  const char* const relative =
      "t0 = tensor float32 1\nd = sub i j\nk = add d 1023\nb0 = load t0 k\nz = add score b0\nscore = z";
  const char* const buckets =  // T5's
      "t0 = tensor bfloat16 2\nd = sub j i\nn = neg d\np = max n 0\nsmall = lt p 16\nf = float p\ng = max f 1.0\n"
      "l = log g\nm = mul l 5.0\nq = int m\nr = add q 2\nu = min r 31\nk = where small p u\nx = load t0 k h\n"
      "z = add score x\nscore = z";
  const DeviceInfo device{
      .device = {.kind = DeviceKind::cuda}, .arch = 90, .num_sms = 132, .shared_bytes = shared_limit(90)};
  std::vector<Plan> plans;
  for (const char* const text : {bent, relative, buckets}) {
    for (const std::int64_t head_dim : {64, 128, 256}) {
      Problem problem{.batch = 2,
                      .seq_q = 1024,
                      .seq_kv = 1024,
                      .heads_q = 8,
                      .heads_kv = 8,
                      .head_dim = head_dim,
                      .dtype = Dtype::bfloat16,
                      .program = text};
      if (text == relative) problem.program_sizes[0] = {2047, 0, 0, 0};
      if (text == buckets) problem.program_sizes[0] = {32, 8, 0, 0};
      plans.push_back(make_plan(problem, Pass::forward, device, "forward/sm90"));
      plans.push_back(make_plan(problem, Pass::backward, device, "backward/sm90"));
    }
  }
  expect_plans_compile(plans, 90);
}

// Short programs, whose backward pass makes dQ in the same kernel as dK and dV.
TEST(ProgramCompile, Sm90ShortPrograms) {
  if (const std::string reason = why_no_compiler(); !reason.empty()) GTEST_SKIP() << reason;
  const char* const bent = "x = div score 20.0\ny = tanh x\nz = mul y 30.0\nscore = z";
  const char* const sloped =
      "t0 = tensor float32 1\nd = sub i j\nf = float d\na = max f 0.0\nx = load t0 h\ny = mul a x\nz = sub score y\nscore "
      "= z";
  const char* const waves =  // as many values as are short
      "d = sub i j\nf = float d\ny = mul f score\nw = sigmoid y\nz = add w score\nscore = z";
  const DeviceInfo device{
      .device = {.kind = DeviceKind::cuda}, .arch = 90, .num_sms = 132, .shared_bytes = shared_limit(90)};
  std::vector<Plan> plans;
  for (const char* const text : {bent, sloped, waves}) {
    for (const bool causal : {true, false}) {
      if (!with_long_tail() && (causal || text != waves)) continue;
      Problem problem{.batch = 1, .seq_q = 2048, .seq_kv = 2048, .heads_q = 16, .heads_kv = 16, .head_dim = 128};
      problem.dtype = Dtype::bfloat16, problem.program = text, problem.causal = causal;
      if (text == sloped) problem.program_sizes[0] = {16, 0, 0, 0};
      plans.push_back(make_plan(problem, Pass::backward, device, "backward/sm90"));
      for (const Launch& launch : plans.back().launches) EXPECT_NE(launch.unit, "backward/sm90/separate_dq") << text;
    }
  }
  expect_plans_compile(plans, 90);
}

}  // namespace
}  // namespace flash_attention::testing
