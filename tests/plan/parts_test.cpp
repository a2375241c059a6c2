// backward/sm90 block by block: what a part is, which launches it has, where its rows are in the workspace of all parts.
#include <gtest/gtest.h>

#include "abi/workspace.h"
#include "flash_attention/error.h"
#include "plan/request.h"
#include "plan/workspace.h"

namespace flash_attention::testing {
namespace {

using plan::BackwardPart;
using Region = abi::BackwardSm90Region;

Problem block_of_rows(std::int64_t queries, std::int64_t keys) {
  Problem p{.batch = 1, .seq_q = queries, .seq_kv = keys, .heads_q = 16, .heads_kv = 16, .head_dim = 128};
  p.dtype = Dtype::bfloat16;
  return p;
}

DeviceInfo h200() { return {.device = {.kind = DeviceKind::cuda}, .arch = 90, .num_sms = 132, .shared_bytes = 232448}; }

std::string part_refusal(const Problem& problem, const std::string& part) {
  try {
    return "planned " + make_plan(problem, Pass::backward, h200(), "backward/sm90@" + part).kernel;
  } catch (const Error& error) {
    return error.what();
  }
}

TEST(BackwardParts, AreReadFromTheNameOfAKernel) {
  const auto rows = plan::parse_kernel("backward/sm90@rows:4096");
  EXPECT_EQ(rows.kernel, "backward/sm90");
  EXPECT_FALSE(rows.tile.has_value());
  EXPECT_EQ(rows.part->kind, BackwardPart::Kind::rows);
  EXPECT_EQ(rows.part->rows, 4096);
  EXPECT_EQ(plan::parse_kernel("@dq:64").part->kind, BackwardPart::Kind::dq);
  const auto block = plan::parse_kernel("backward/sm90@block:4096+2048/3").part;
  EXPECT_EQ(block->kind, BackwardPart::Kind::block);
  EXPECT_EQ(block->rows, 4096);
  EXPECT_EQ(block->first, 2048);
  EXPECT_EQ(block->number, 3);
  for (const char* wrong : {"@rows:", "@rows:-1", "@rows:64x64", "@block:64", "@block:64+0", "@block:64+0/",
                            "@block:64+0/1/", "@block:64+-64/0", "@dq", "@row:64"}) {
    EXPECT_THROW(plan::parse_kernel(wrong), Error) << wrong;
  }
}

TEST(BackwardParts, HaveTheLaunchesOfAPassBetweenThem) {
  const Plan whole = make_plan(block_of_rows(4096, 4096), Pass::backward, h200(), "backward/sm90");
  std::vector<Launch> launches;
  for (const char* part : {"rows:4096", "block:4096+0/0", "dq:4096"}) {
    const Plan plan = make_plan(block_of_rows(4096, 4096), Pass::backward, h200(), std::string("backward/sm90@") + part);
    EXPECT_EQ(plan.shared_rows, 4096);
    launches.insert(launches.end(), plan.launches.begin(), plan.launches.end());
  }
  EXPECT_EQ(launches, whole.launches);  // the same kernels: nothing is compiled for parts
  EXPECT_EQ(whole.shared_rows, 0);
}

TEST(BackwardParts, ShareOneWorkspace) {
  const Plan first = make_plan(block_of_rows(4096, 2048), Pass::backward, h200(), "backward/sm90@block:4096+0/0");
  const Plan second = make_plan(block_of_rows(2048, 4096), Pass::backward, h200(), "backward/sm90@block:4096+2048/1");
  const Plan rows = make_plan(block_of_rows(4096, 1), Pass::backward, h200(), "backward/sm90@rows:4096");
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
  EXPECT_EQ(part_refusal(plain, "block:256+128/0"), "planned backward/sm90");
  EXPECT_TRUE(has(part_refusal(plain, "block:192+128/0"), "other rows than the part"));
  EXPECT_TRUE(has(part_refusal(plain, "rows:256"), "other rows than the part"));
  EXPECT_TRUE(has(part_refusal(plain, "block:256+32/0"), "tiles of 64 rows"));
  EXPECT_TRUE(has(part_refusal(block_of_rows(100, 128), "block:256+64/0"), "tiles of 64 rows"));
  EXPECT_EQ(part_refusal(block_of_rows(100, 128), "block:164+64/0"), "planned backward/sm90");  // the last rows of all
  EXPECT_TRUE(has(part_refusal(plain, "block:256+128/256"), "at most 256 blocks"));
  Problem two = plain;
  two.batch = 2;
  EXPECT_TRUE(has(part_refusal(two, "block:256+128/0"), "one sequence"));
  Problem fixed = plain;
  fixed.deterministic = true;
  EXPECT_TRUE(has(part_refusal(fixed, "block:256+128/0"), "in any order"));
  Problem wide = plain;
  wide.head_dim = 256;
  EXPECT_TRUE(has(part_refusal(wide, "block:256+128/0"), "in any order"));
  Problem sink = plain;
  sink.sink = true;
  EXPECT_TRUE(has(part_refusal(sink, "block:256+128/0"), "no gradients but those of q, k and v"));
  Problem few = block_of_rows(4096, 4096);
  few.heads_kv = 1;
  EXPECT_TRUE(has(part_refusal(few, "block:4096+0/0"), "groups are split"));
  Problem masked = plain;
  masked.hidden_rows.bounds = 1;
  EXPECT_TRUE(has(part_refusal(masked, "block:256+128/0"), "no masks"));
  try {
    make_plan(plain, Pass::backward, h200(), "backward/sm80@rows:128");
    FAIL();
  } catch (const Error& error) {
    EXPECT_TRUE(has(error.what(), "backward/sm80: does no parts of a pass"));
  }
}

}  // namespace
}  // namespace flash_attention::testing
