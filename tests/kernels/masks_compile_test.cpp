// Kernels with hidden rows, block masks and boolean masks compile without spills, on every architecture that has a separate
// kernel: hidden rows of two intervals, which need most registers, block and boolean masks once; all in the long tail.
#include "kernels/sm90_compile.h"
#include "support/long_tail.h"

namespace flash_attention::testing {
namespace {

Problem with_rows(std::int64_t head_dim, int bounds, bool causal = true) {
  Problem p = problem(head_dim, causal);
  p.hidden_rows.bounds = bounds;
  return p;
}

Problem with_blocks(std::int64_t head_dim) {
  Problem p = problem(head_dim);
  p.block_mask = {.block_q = 128, .block_kv = 128, .head_stride = 64, .q_stride = 8};
  return p;
}

/// A boolean mask that all share.
Problem with_bytes(std::int64_t head_dim, std::int64_t length = 1024) {
  Problem p = problem(head_dim);
  p.seq_q = p.seq_kv = length;
  p.mask = {.present = true, .q_stride = length};
  return p;
}

void expect_mask_kernels_compile(const std::vector<Problem>& problems, Pass pass, const char* kernel, int arch,
                                 int allowed_spill_bytes = 0) {
  if (const std::string reason = why_no_compiler(); !reason.empty()) GTEST_SKIP() << reason;
  DeviceInfo device = h200();
  device.arch = arch;
  device.shared_bytes = shared_limit(arch);
  std::vector<Plan> plans;
  for (const Problem& p : problems) plans.push_back(make_plan(p, pass, device, kernel));
  expect_plans_compile(plans, arch, allowed_spill_bytes);
}

std::vector<Problem> mask_problems(std::initializer_list<std::int64_t> dims, bool also_blocks = false) {
  std::vector<Problem> problems;
  for (const std::int64_t dim : dims) {
    if (dim != 128 && !with_long_tail()) continue;
    if (with_long_tail()) problems.push_back(with_rows(dim, 1));
    problems.push_back(with_rows(dim, 4, false));
    if (also_blocks || with_long_tail()) problems.push_back(with_blocks(dim));
  }
  return problems;
}

TEST(MasksCompile, PortableForward) {
  if (!with_long_tail()) GTEST_SKIP() << "long tail";
  expect_mask_kernels_compile({with_rows(64, 4)}, Pass::forward, "forward/portable", 80);
}
TEST(MasksCompile, PortableBackward) {
  if (!with_long_tail()) GTEST_SKIP() << "long tail";
  expect_mask_kernels_compile({with_blocks(64)}, Pass::backward, "backward/portable", 80);
}
TEST(MasksCompile, Sm80Forward) {
  expect_mask_kernels_compile(mask_problems({64, 128}), Pass::forward, "forward/sm80", 80);
}
TEST(MasksCompile, Sm80Backward) {
  std::vector<Problem> problems = mask_problems({128}, true);
  if (with_long_tail()) {
    problems.push_back(with_rows(128, 2));
    problems.back().deterministic = true;
  }
  expect_mask_kernels_compile(problems, Pass::backward, "backward/sm80", 80);
}

TEST(MasksCompile, Sm90Forward) {
  std::vector<Problem> problems = mask_problems({64, 128});
  for (const std::int64_t dim : {128, 256}) {  // blocks of 128 and of 64 keys
    if (dim == 128 || with_long_tail()) problems.push_back(with_bytes(dim));
  }
  problems.push_back(with_rows(64, 1));  // a bias by TMA next to words that the kernel makes
  problems.back().heads_q = 2;
  problems.back().bias = {.present = true, .dtype = Dtype::bfloat16, .q_stride = 1024};
  if (with_long_tail()) {
    problems.push_back(with_rows(128, 2));
    problems.back().packed = true, problems.back().total_q = problems.back().total_kv = 2000;
  }
  expect_mask_kernels_compile(problems, Pass::forward, "forward/sm90", 90);
}

TEST(MasksCompile, Sm90Backward) {
  std::vector<Problem> problems = mask_problems({64, 128});
  problems.push_back(with_rows(128, 1));  // the queries of the first keys come in parts
  problems.back().seq_q = problems.back().seq_kv = 4096;
  problems.push_back(with_bytes(128, 4096));
  if (with_long_tail()) {
    problems.push_back(with_rows(128, 2));
    problems.back().deterministic = true;
  }
  expect_mask_kernels_compile(problems, Pass::backward, "backward/sm90", 90);
}

}  // namespace
}  // namespace flash_attention::testing
