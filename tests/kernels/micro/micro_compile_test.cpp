// The micro-benchmarks compile for the GPU they measure.
#include "kernels/sm90_compile.h"

namespace flash_attention::testing {
namespace {

Plan plan_of(const std::string& name, int warpgroups, const std::string& config) {
  Plan plan;
  plan.kernel = "micro/" + name;
  plan.launches.push_back({.unit = plan.kernel,
                           .entry = "micro_" + name,
                           .config = "MicroConfig{.warpgroups = " + std::to_string(warpgroups) + config + "}",
                           .block = 128 * warpgroups});
  return plan;
}

TEST(MicroCompiles, EveryKind) {
  if (const std::string reason = why_no_compiler(); !reason.empty()) GTEST_SKIP() << reason;
  std::vector<Plan> plans;
  for (const char* n : {"32", "80", "192"}) {
    plans.push_back(plan_of("wgmma", 3, std::string(", .n = ") + n));
    plans.push_back(plan_of("wgmma", 3, std::string(", .n = ") + n + ", .registers = true"));
  }
  plans.push_back(plan_of("exp2", 2, ", .polynomials = 2"));
  plans.push_back(plan_of("reduce", 2, ""));
  plans.push_back(plan_of("reduce", 2, ", .registers = true"));
  plans.push_back(plan_of("handoff", 2, ""));
  plans.push_back(plan_of("handoff", 2, ", .named = true"));
  expect_plans_compile(plans, 90);
}

}  // namespace
}  // namespace flash_attention::testing
