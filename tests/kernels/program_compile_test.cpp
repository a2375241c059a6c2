#include <gtest/gtest.h>

#include "support/compile.h"

namespace flash_attention::testing {
namespace {

// ALiBi as a program in documents, with all that a program can need: tensors of each type, a number, a gradient.
Problem problem_with_program(Dtype dtype) {
  Problem problem{.batch = 2, .seq_q = 1024, .seq_kv = 1024, .heads_q = 8, .heads_kv = 8, .head_dim = 128, .dtype = dtype};
  problem.program =
      "t0 = tensor float32 1\nt1 = tensor int64 2\ns0 = scalar int\n"
      "d = sub i j\nf = float d\na = abs f\nx = load t0 h\ny = mul a x\nz = sub score y\n"
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
  if (arch == 90 && pass == Pass::backward) problem.program.resize(problem.program.find("\nvisible"));
  expect_plan_compiles(make_plan(problem, pass, device, kernel), arch);
}

TEST(ProgramCompile, Portable) {
  expect_compile(Pass::forward, "forward/portable", Dtype::float32, 75);
  expect_compile(Pass::backward, "backward/portable", Dtype::float32, 75);
}

TEST(ProgramCompile, Sm80) {
  expect_compile(Pass::forward, "forward/sm80", Dtype::bfloat16, 80);
  expect_compile(Pass::backward, "backward/sm80", Dtype::bfloat16, 80);
}

TEST(ProgramCompile, Sm90) { expect_compile(Pass::forward, "forward/sm90", Dtype::bfloat16, 90); }

}  // namespace
}  // namespace flash_attention::testing
