// forward/sm90 and backward/sm90 over lists of blocks of keys compile and spill nothing: with stacked heads and without.
#include "kernels/sm90_compile.h"
#include "support/long_tail.h"

namespace flash_attention::testing {
namespace {

Problem with_lists(std::int64_t head_dim, std::int64_t block_q, std::int64_t block_kv, std::int64_t heads = 2) {
  Problem p = problem(head_dim);
  p.key_list = {.kind = KeyListKind::blocks, .entries = 4, .heads = heads, .block_q = block_q, .block_kv = block_kv};
  return p;
}

TEST(Sm90ListsCompile, WithoutSpills) {
  if (const std::string reason = why_no_compiler(); !reason.empty()) GTEST_SKIP() << reason;
  std::vector<Problem> problems{with_lists(128, 1, 128), with_lists(128, 64, 64, 8), with_lists(128, 1, 128)};
  problems.back().softcap = 30, problems.back().window_left = 500;
  if (with_long_tail()) {
    for (const std::int64_t head_dim : {64, 128, 256}) {
      for (const std::int64_t block_q : {1, 5, 64, 128}) problems.push_back(with_lists(head_dim, block_q, 128));
      problems.push_back(with_lists(head_dim, 1, 64));
      problems.back().causal = false;
    }
  }
  std::vector<Plan> plans;
  for (const Problem& p : problems) {
    plans.push_back(make_plan(p, Pass::forward, h200(), "forward/sm90"));
    ASSERT_EQ(plans.back().launches.front().unit, "mask/list_map");
    if (p.head_dim > 128) continue;
    plans.push_back(make_plan(p, Pass::backward, h200(), "backward/sm90"));
    ASSERT_EQ(plans.back().launches.front().unit, "mask/list_map");
  }
  expect_plans_compile(plans, 90);
}

}  // namespace
}  // namespace flash_attention::testing
