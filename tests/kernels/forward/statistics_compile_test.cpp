// Kernels that compute statistics compile and spill nothing: each kernel in the head dimension with the fewest registers to
// spare, and with all options.
#include "kernels/sm90_compile.h"
#include "support/long_tail.h"

namespace flash_attention::testing {
namespace {

Problem with_statistics(Problem problem) {
  problem.return_max_logit = problem.return_key_mass = problem.return_entropy = true;
  return problem;
}

void expect_compile(const char* kernel, int arch, const std::vector<Problem>& problems, Pass pass = Pass::forward) {
  if (const std::string reason = why_no_compiler(); !reason.empty()) GTEST_SKIP() << reason;
  DeviceInfo device = h200();
  device.arch = arch, device.shared_bytes = shared_limit(arch);
  std::vector<Plan> plans;
  for (const Problem& p : problems) plans.push_back(make_plan(with_statistics(p), pass, device, kernel));
  expect_plans_compile(plans, arch);
}

TEST(StatisticsCompile, Sm90) {
  std::vector<Problem> problems{problem(128, true)};
  problems.push_back(problem(64, false));
  problems.back().seq_q = problems.back().seq_kv = 8192;
  if (with_long_tail()) problems.insert(problems.end(), {problem(64, true), problem(128, false), problem(256, true)});
  expect_compile("forward/sm90", 90, problems);
}

TEST(StatisticsCompile, Sm90LargestScore) {
  if (const std::string reason = why_no_compiler(); !reason.empty()) GTEST_SKIP() << reason;
  std::vector<Plan> plans;
  for (Problem p : {problem(64, false), problem(256, true), problem(64, true)}) {
    if (p.causal && p.head_dim == 64 && !with_long_tail()) continue;
    if (p.head_dim == 64) p.seq_q = p.seq_kv = 8192;
    p.return_max_logit = true;
    plans.push_back(make_plan(p, Pass::forward, h200(), "forward/sm90"));
  }
  expect_plans_compile(plans, 90);
}

TEST(StatisticsCompile, Sm80) {
  std::vector<Problem> problems{problem(128, true)};
  if (with_long_tail()) problems.insert(problems.end(), {problem(64, false), problem(256, true)});
  expect_compile("forward/sm80", 80, problems);
}

TEST(StatisticsCompile, Portable) {
  expect_compile("forward/portable", 80, {problem(64, true)});
  expect_compile("backward/portable", 80, {problem(64, true)}, Pass::backward);
}

}  // namespace
}  // namespace flash_attention::testing
