#include <gtest/gtest.h>

#include <cctype>

#include "flash_attention/error.h"
#include "plan/kernel_table.h"
#include "support/compile.h"
#include "support/long_tail.h"

// Every GPU kernel of the capability table, on a machine with or without a GPU.
namespace flash_attention::testing {
namespace {

DeviceInfo gpu_of(int arch) {
  DeviceInfo info;
  info.device.kind = DeviceKind::cuda;
  info.arch = arch;
  info.num_sms = arch == 80 ? 108 : 132;
  info.shared_bytes = shared_limit(arch);
  info.l2_bytes = 40 << 20;
  return info;
}

Problem plain(std::int64_t head_dim, Dtype dtype, bool causal) {
  return {.batch = 2,
          .seq_q = 1024,
          .seq_kv = 1024,
          .heads_q = 8,
          .heads_kv = 2,
          .head_dim = head_dim,
          .dtype = dtype,
          .causal = causal};
}

Problem with_all_options(std::int64_t head_dim, Dtype dtype) {
  Problem problem = plain(head_dim, dtype, true);
  problem.window_left = 100;
  problem.softcap = 20;
  problem.alibi = true;
  problem.bias = {.present = true, .dtype = Dtype::float32, .q_stride = 1024};
  problem.mask = {.present = true, .q_stride = 1024};
  problem.key_lengths = true;
  problem.packed = true;
  problem.total_q = problem.total_kv = 2000;
  problem.seqused_q = problem.seqused_kv = true;
  problem.sink = true;
  problem.dropout_p = 0.1f;
  return problem;
}

std::vector<Problem> all_options() { return {plain(40, Dtype::float16, false), with_all_options(64, Dtype::float16)}; }

/// Plans for those of the problems that the kernel takes; an empty name lets the planner choose.
std::vector<Plan> plans_of(const std::vector<Problem>& problems, Pass pass, int arch, const std::string& kernel) {
  std::vector<Plan> plans;
  for (const Problem& problem : problems) {
    try {
      plans.push_back(make_plan(problem, pass, gpu_of(arch), kernel));
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::unsupported) << error.what();
    }
  }
  return plans;
}

struct Subject {
  std::string kernel;  // empty: the planner's choice
  Pass pass;
  int arch;
};

std::string name_of(const ::testing::TestParamInfo<Subject>& subject) {
  const auto& [kernel, pass, arch] = subject.param;
  std::string name = (kernel.empty() ? std::string(to_string(pass)) : kernel) + "_" + jit::arch_name(arch);
  for (char& c : name) c = std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
  return name;
}

class KernelCompiles : public ::testing::TestWithParam<Subject> {
 protected:
  void SetUp() override {
    if (const std::string reason = why_no_compiler(); !reason.empty()) GTEST_SKIP() << reason;
  }
};

class PlannersChoice : public KernelCompiles {};

/// What users get for the usual problems.
TEST_P(PlannersChoice, spills_nothing) {
  const auto& [kernel, pass, arch] = GetParam();
  std::vector<Problem> problems{plain(128, Dtype::bfloat16, true)};
  if (with_long_tail()) {
    for (const std::int64_t head_dim : {64, 128}) problems.push_back(plain(head_dim, Dtype::bfloat16, false));
    for (const Dtype dtype : {Dtype::bfloat16, Dtype::float16}) problems.push_back(plain(64, dtype, true));
    problems.push_back(plain(256, Dtype::float16, true));
  }
  const std::vector<Plan> plans = plans_of(problems, pass, arch, "");
  EXPECT_EQ(plans.size(), problems.size());
  expect_plans_compile(plans, arch);
}

/// forward/fp32's tile of 128 x 32 spills 56 bytes at 128 columns. That of 64 x 32, which spills none, is slower: 26.0
/// instead of 33.5 TFLOP/s (H200, 2 x 8 x 4096 x 128).
TEST_P(PlannersChoice, spills_little_in_float32) {
  const auto& [kernel, pass, arch] = GetParam();
  if (arch != 80 && !with_long_tail()) GTEST_SKIP() << "nothing in it depends on arch";
  Problem problem = plain(128, Dtype::float32, true);  // others: tests/kernels/tf32_compile_test.cpp
  problem.precision = Precision::ieee;
  expect_plans_compile(plans_of({problem}, pass, arch, ""), arch, 64);
}

INSTANTIATE_TEST_SUITE_P(, PlannersChoice,
                         ::testing::Values(Subject{"", Pass::forward, 80}, Subject{"", Pass::forward, 90},
                                           Subject{"", Pass::backward, 80}, Subject{"", Pass::backward, 90}),
                         name_of);

class EveryKernel : public KernelCompiles {};

/// Every row of the table with all options at once, where a few registers more than there are must not matter.
TEST_P(EveryKernel, compiles_with_all_options) {
  constexpr int allowed_spill_bytes = 512;
  const auto& [kernel, pass, arch] = GetParam();
  const std::vector<Plan> plans = plans_of(all_options(), pass, arch, kernel);
  if (plans.empty()) GTEST_SKIP() << kernel << " takes none of the problems on sm_" << arch;
  expect_plans_compile(plans, arch, allowed_spill_bytes);
}

/// Those whose compile tests in tests/kernels take all options at once, and allow no spill.
bool has_tests_with_all_options(std::string_view kernel) {
  for (const char* start : {"ladder/", "standard/", "decode/sm80", "forward/portable", "forward/sm80", "forward/sm90",
                            "backward/portable", "backward/sm80", "tangent/", "second/"}) {
    if (kernel.starts_with(start)) return true;
  }
  return false;
}

std::vector<Subject> every_kernel() {
  std::vector<Subject> all;
  for (const plan::KernelEntry& entry : plan::kernel_table()) {
    if (entry.device != DeviceKind::cuda) continue;
    if (has_tests_with_all_options(entry.name) && !with_long_tail()) continue;
    // For the oldest architecture that it runs on; in the long tail for both.
    for (const int arch : {80, 90}) {
      const Subject subject{std::string(entry.name), entry.pass, arch};
      if (with_long_tail() || !plans_of(all_options(), subject.pass, arch, subject.kernel).empty()) all.push_back(subject);
      if (!with_long_tail() && !all.empty() && all.back().kernel == subject.kernel) break;
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(, EveryKernel, ::testing::ValuesIn(every_kernel()), name_of);

}  // namespace
}  // namespace flash_attention::testing
