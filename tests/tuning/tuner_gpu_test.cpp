#include <gtest/gtest.h>

#include <functional>

#include "api/backends.h"
#include "api/checks/validate.h"
#include "flash_attention/tune.h"
#include "plan/kernel_table.h"
#include "support/gpu.h"
#include "tuning/self_test.h"
#include "tuning/tuner.h"

namespace flash_attention::tuning {
namespace {

Problem of(Dtype dtype, std::int64_t head_dim) {
  Problem p{.batch = 2, .seq_q = 611, .seq_kv = 1237, .heads_q = 8, .heads_kv = 4, .head_dim = head_dim};
  p.dtype = dtype;
  p.causal = true;
  return p;
}

/// Every choice of every problem computes the same, whatever the options, and times are those of a GPU.
TEST(TunerOnGpu, all_choices_agree) {
  REQUIRE_GPU(80);
  const Device device{.kind = DeviceKind::cuda};
  const DeviceInfo info = device_info(device);
  const Backend& backend = api::backend_of(device);
  const std::vector<std::pair<Pass, std::function<void(Problem&)>>> calls{
      {Pass::forward, [](Problem&) {}},
      {Pass::backward, [](Problem&) {}},
      {Pass::forward, [](Problem& p) { p.seq_q = 3, p.seqused_kv = true, p.page_size = 64, p.num_pages = 50; }},
  };
  for (const std::int64_t head_dim : {128}) {
    for (const auto& [pass, change] : calls) {
      Problem problem = of(Dtype::bfloat16, head_dim);
      change(problem);
      const Call call{api::normalise(problem, pass), pass, api::normalise(problem, Pass::forward)};
      const TunedCase tuned = tune_case(call, info, backend, tools_of(info, backend), 0.05, {});
      EXPECT_EQ(tuned.result.skipped, "") << to_string(problem);
      EXPECT_TRUE(tuned.decided);
      EXPECT_EQ(tuned.result.dropped, std::vector<std::string>{}) << to_string(problem);
      EXPECT_GT(tuned.result.usual_seconds, 1e-6);
      EXPECT_LT(tuned.result.usual_seconds, 1e-2);
    }
  }
}

/// The self-test of kernels that are right: where it is too strict, a GPU that nobody has run them on does without them.
TEST(SelfTestOnGpu, passes_every_kernel_that_is_right) {
  REQUIRE_GPU(80);
  const Device device{.kind = DeviceKind::cuda};
  const Machine gpu{device_info(device), api::backend_of(device)}, host{device_info({}), api::backend_of(Device{})};
  const Load load = [&](const Problem& problem, const Plan& plan) {
    return gpu.backend.load(problem, plan, gpu.device, nullptr);
  };
  for (const plan::KernelEntry& entry : plan::kernel_table()) {
    if (!device_traits(entry.device).gpu_kernels || !entry.automatic || plan::is_last_resort(entry)) continue;
    std::vector<Call> calls;
    for (const Problem& problem : hostile_problems(entry.pass))
      calls.push_back({api::normalise(problem, entry.pass), entry.pass, api::normalise(problem, Pass::forward)});
    Problem model{.seq_q = entry.name.starts_with("decode") ? 1 : 1024, .head_dim = 128};
    model.dtype = entry.name.ends_with("tf32") ? Dtype::float32 : Dtype::bfloat16;
    const Problem long_one = timed_problem(model);
    const Call timed{api::normalise(long_one, entry.pass), entry.pass, api::normalise(long_one, Pass::forward)};
    const std::string stand_in = std::string(to_string(entry.pass)) + "/portable";
    const plan::Verdict verdict = self_test(entry.name, entry.pass, calls, &timed, stand_in, gpu, host, load);
    EXPECT_TRUE(verdict.passed) << entry.name << ": " << verdict.reason;
  }
}

}  // namespace
}  // namespace flash_attention::tuning
