// backward/sm90 block by block: what a part is, which launches it has, where its rows are in the workspace of all parts.
#include <gtest/gtest.h>

#include "abi/workspace.h"
#include "flash_attention/error.h"
#include "plan/workspace.h"

namespace flash_attention::testing {
namespace {

using Kind = BackwardPart::Kind;
using Region = abi::BackwardSm90Region;

Problem block_of_rows(std::int64_t queries, std::int64_t keys) {
  Problem p{.batch = 1, .seq_q = queries, .seq_kv = keys, .heads_q = 16, .heads_kv = 16, .head_dim = 128};
  p.dtype = Dtype::bfloat16;
  return p;
}

DeviceInfo h200() { return {.device = {.kind = DeviceKind::cuda}, .arch = 90, .num_sms = 132, .shared_bytes = 232448}; }

std::string part_refusal(const Problem& problem, const BackwardPart& part) {
  try {
    return "planned " + make_plan(problem, Pass::backward, h200(), "backward/sm90", {}, part).kernel;
  } catch (const Error& error) {
    return error.what();
  }
}

TEST(BackwardParts, HaveTheLaunchesOfAPassBetweenThem) {
  const Plan whole = make_plan(block_of_rows(4096, 4096), Pass::backward, h200(), "backward/sm90");
  std::vector<Launch> launches;
  for (const BackwardPart& part : {BackwardPart{Kind::rows, 4096}, {Kind::block, 4096, 0, 0}, {Kind::dq, 4096}}) {
    const Plan plan = make_plan(block_of_rows(4096, 4096), Pass::backward, h200(), "backward/sm90", {}, part);
    EXPECT_EQ(plan.shared_rows, 4096);
    launches.insert(launches.end(), plan.launches.begin(), plan.launches.end());
  }
  EXPECT_EQ(launches, whole.launches);  // the same kernels: nothing is compiled for parts
  EXPECT_EQ(whole.shared_rows, 0);
}

TEST(BackwardParts, ShareOneWorkspace) {
  const auto plan_of = [](const Problem& problem, const BackwardPart& part) {
    return make_plan(problem, Pass::backward, h200(), "backward/sm90", {}, part);
  };
  const Plan first = plan_of(block_of_rows(4096, 2048), {Kind::block, 4096, 0, 0});
  const Plan second = plan_of(block_of_rows(2048, 4096), {Kind::block, 4096, 2048, 1});
  const Plan rows = plan_of(block_of_rows(4096, 1), {Kind::rows, 4096});
  EXPECT_EQ(first.workspace_bytes, second.workspace_bytes);
  EXPECT_EQ(first.workspace_bytes, rows.workspace_bytes);
  const auto between = [&](Region region) { return plan::offset_of(second, region) - plan::offset_of(first, region); };
  EXPECT_EQ(between(Region::lse2), 2048 * 4);
  EXPECT_EQ(between(Region::delta), 2048 * 4);
  EXPECT_EQ(between(Region::dQ), 2048 * 128 * 4);
  EXPECT_EQ(between(Region::parts), 2048 * 16);
  EXPECT_EQ(between(Region::tasks), 8);  // blocks may run at once: counters of their own
  EXPECT_EQ(rows.zeroed_bytes, 256u * 8);
  EXPECT_EQ(first.zeroed_bytes, 0u);
  EXPECT_GE(plan::offset_of(first, Region::lse2), static_cast<std::int64_t>(rows.zeroed_bytes));
}

TEST(BackwardParts, AreRefusedByName) {
  const auto has = [](const std::string& text, const char* part) { return text.find(part) != std::string::npos; };
  const Problem plain = block_of_rows(128, 128);
  EXPECT_EQ(part_refusal(plain, {Kind::block, 256, 128, 0}), "planned backward/sm90");
  EXPECT_TRUE(has(part_refusal(plain, {Kind::block, 192, 128, 0}), "other rows than the part"));
  EXPECT_TRUE(has(part_refusal(plain, {Kind::rows, 256}), "other rows than the part"));
  EXPECT_TRUE(has(part_refusal(plain, {Kind::block, 256, 32, 0}), "tiles of 64 rows"));
  EXPECT_TRUE(has(part_refusal(block_of_rows(100, 128), {Kind::block, 256, 64, 0}), "tiles of 64 rows"));
  EXPECT_EQ(part_refusal(block_of_rows(100, 128), {Kind::block, 164, 64, 0}), "planned backward/sm90");  // the last rows
  EXPECT_TRUE(has(part_refusal(plain, {Kind::block, 256, 128, 256}), "at most 256 blocks"));
  Problem two = plain;
  two.batch = 2;
  EXPECT_TRUE(has(part_refusal(two, {Kind::block, 256, 128, 0}), "one sequence"));
  Problem fixed = plain;
  fixed.deterministic = true;
  EXPECT_TRUE(has(part_refusal(fixed, {Kind::block, 256, 128, 0}), "in any order"));
  Problem wide = plain;
  wide.head_dim = 256;
  EXPECT_TRUE(has(part_refusal(wide, {Kind::block, 256, 128, 0}), "in any order"));
  Problem sink = plain;
  sink.sink = true;
  EXPECT_TRUE(has(part_refusal(sink, {Kind::block, 256, 128, 0}), "no gradients but those of q, k and v"));
  Problem few = block_of_rows(4096, 4096);
  few.heads_kv = 1;
  EXPECT_TRUE(has(part_refusal(few, {Kind::block, 4096, 0, 0}), "groups are split"));
  Problem masked = plain;
  masked.hidden_rows.bounds = 1;
  EXPECT_TRUE(has(part_refusal(masked, {Kind::block, 256, 128, 0}), "no masks"));
  try {
    make_plan(plain, Pass::backward, h200(), "backward/sm80", {}, BackwardPart{Kind::rows, 128});
    FAIL();
  } catch (const Error& error) {
    EXPECT_TRUE(has(error.what(), "backward/sm80: does no parts of a pass"));
  }
}

}  // namespace
}  // namespace flash_attention::testing
