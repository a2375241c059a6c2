// forward/sm90 where few row tiles have many keys: several work tiles share the keys of each, and their parts are merged.
#include "emulator/host/seed.h"
#include "flash_attention/attention.h"
#include "plan/kernel_config.h"
#include "support/cases/contract.h"

namespace flash_attention::testing {
namespace {

constexpr Device splitting_gpu{.kind = DeviceKind::emulator, .emulated_arch = 90};

Case make_split(const char* name, Problem p) {
  p.batch = 1;
  if (p.dtype == Dtype::float32) p.dtype = Dtype::bfloat16;
  Case c;
  c.name = name, c.problem = p;
  return c;
}

using ForwardSm90Splits = ::testing::TestWithParam<Case>;

TEST_P(ForwardSm90Splits, KeepTheContract) {
  emulator::set_num_sms(8);
  const Case& c = GetParam();
  const Plan plan = make_plan(c.problem, Pass::forward, device_info(splitting_gpu), "forward/sm90");
  ASSERT_GT(plan.num_splits, 1);
  ASSERT_EQ(plan.launches.size(), 2u);
  emulator::set_seed(std::hash<std::string>{}(c.name));
  check(c, {.device = splitting_gpu, .kernel = "forward/sm90", .pass = Pass::forward});
}

std::vector<Case> splits() {
  std::vector<Case> cases = {
      make_split("full", {.seq_q = 130, .seq_kv = 2100, .heads_q = 2, .heads_kv = 1, .head_dim = 64}),
      make_split("causal", {.seq_q = 200, .seq_kv = 2300, .heads_q = 1, .heads_kv = 1, .head_dim = 128, .causal = true}),
      make_split("float16", {.seq_q = 100,
                             .seq_kv = 2050,
                             .heads_q = 1,
                             .heads_kv = 1,
                             .head_dim = 72,
                             .head_dim_v = 40,
                             .dtype = Dtype::float16}),
      make_split("wide", {.seq_q = 70, .seq_kv = 1100, .heads_q = 2, .heads_kv = 2, .head_dim = 256, .causal = true}),
      // Two blocks of keys are seen by some row, the others by none: splits without keys.
      make_split("empty", {.seq_q = 130,
                           .seq_kv = 3100,
                           .heads_q = 1,
                           .heads_kv = 1,
                           .head_dim = 64,
                           .causal = true,
                           .alignment = Alignment::top_left}),
      make_split("nan_value", {.seq_q = 130, .seq_kv = 2100, .heads_q = 1, .heads_kv = 1, .head_dim = 64, .causal = true}),
      make_split("nan_key", {.seq_q = 130, .seq_kv = 2100, .heads_q = 1, .heads_kv = 1, .head_dim = 64, .causal = true}),
  };
  cases[5].nan_value = cases[6].nan_key = 2050;
  // References that differ from split to split, and rows whose weight is in one of them.
  const std::pair<const char*, Draw> draws[] = {
      {"growing", Draw::growing}, {"falling", Draw::falling}, {"spike", Draw::spike}, {"huge", Draw::huge}};
  for (const auto& [name, draw] : draws) {
    cases.push_back(make_split(name, {.seq_q = 70, .seq_kv = 2100, .heads_q = 1, .heads_kv = 1, .head_dim = 64}));
    cases.back().draw = draw;
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Sm90, ForwardSm90Splits, ::testing::ValuesIn(splits()), case_name);

}  // namespace
}  // namespace flash_attention::testing
