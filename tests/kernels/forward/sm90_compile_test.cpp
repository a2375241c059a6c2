// Configurations that the planner gives forward/sm90 compile, spill nothing, and no wgmma is serialised: one for each
// structure, in the tile with the most accumulators, and all options together; every tile and option in the long tail. What
// is chosen for the usual problem, 128 under a causal mask, is compiled in tests/jit/kernels_compile_test.cpp.
#include "kernels/sm90_compile.h"

#include "support/long_tail.h"

namespace flash_attention::testing {
namespace {

void expect_forward_compiles(const std::vector<Problem>& problems) {
  if (const std::string reason = why_no_compiler(); !reason.empty()) GTEST_SKIP() << reason;
  std::vector<Plan> plans;
  for (const Problem& p : problems) plans.push_back(make_plan(p, Pass::forward, h200(), "forward/sm90"));
  expect_plans_compile(plans, 90);
}

TEST(ForwardSm90Compiles, HeadDims) {
  std::vector<Problem> problems;
  for (std::int64_t dim : {8, 40, 64, 96, 128, 160, 192, 224, 256}) {
    if (with_long_tail()) problems.push_back(problem(dim, false));
    if (dim == 256 || with_long_tail()) problems.push_back(problem(dim, true));
  }
  problems.push_back(problem(512));
  if (with_long_tail()) {
    problems.push_back(problem(192));
    problems.back().head_dim_v = 128;
    problems.push_back(problem(576, false));
    problems.back().head_dim_v = 512;
    problems.push_back(problem(64));
    problems.back().head_dim_v = 264;
    problems.push_back(problem(320, false));
  }
  if (with_long_tail()) {
    problems.push_back(problem(64));
    problems.back().head_dim_v = 256;
    problems.push_back(problem(128));
    problems.back().dtype = Dtype::float16;
    problems.push_back(problem(128, false));
    problems.back().seq_q = 1;
  }
  // Lengths at which other tiles are chosen.
  const auto add = [&](std::int64_t dim, bool causal, std::int64_t seq) {
    problems.push_back(problem(dim, causal));
    problems.back().seq_q = problems.back().seq_kv = seq;
  };
  add(64, true, 4096);
  if (with_long_tail()) {
    for (const std::int64_t seq : {77, 600}) add(64, false, seq);  // few row tiles: 128 x 64, 64 x 128
    add(128, true, 128);
  }
  for (const std::int64_t dim : {64, 128, 256}) {  // few queries, many keys: splits
    if (dim != 128 && !with_long_tail()) continue;
    add(dim, true, 8192);
    problems.back().seq_q = 256;
  }
  add(128, false, 8192);
  if (with_long_tail()) {
    add(64, false, 512);
    add(64, true, 4096);
    problems.back().window_left = 1024;  // three warpgroups and two edges
    add(96, false, 8192);
    add(128, true, 16384);
  }
  expect_forward_compiles(problems);
}

/// All options together at the head dimension with the fewest registers to spare; in the long tail at the others and above
/// 256, too, and each alone.
TEST(ForwardSm90Compiles, Options) {
  using Change = void (*)(Problem&);
  const Change changes[] = {
      [](Problem& p) { p.window_left = 100; },
      [](Problem& p) { p.softcap = 20; },
      [](Problem& p) { p.bias = {.present = true, .dtype = Dtype::float32, .q_stride = 1024}; },
      [](Problem& p) { p.dropout_p = 0.1f; },
      [](Problem& p) { p.packed = true, p.total_q = p.total_kv = 2000; },
      [](Problem& p) { p.alibi = true; },
      [](Problem& p) { p.mask = {.present = true, .q_stride = 1024}; },
      [](Problem& p) { p.alignment = Alignment::top_left; },
      [](Problem& p) { p.key_lengths = true; },
      [](Problem& p) { p.seqused_q = p.seqused_kv = true; },
      [](Problem& p) { p.sink = true; },
  };
  std::vector<Problem> problems;
  for (std::int64_t dim : {64, 128, 256}) {
    if (dim != 256 && !with_long_tail()) continue;
    Problem all = problem(dim);
    for (Change change : changes) {
      change(all);
      if (dim == 64 || !with_long_tail()) continue;
      problems.push_back(problem(dim));
      change(problems.back());
    }
    problems.push_back(all);
  }
  expect_forward_compiles(problems);
  if (!with_long_tail() || !why_no_compiler().empty()) return;
  Problem wide = problem(512);
  for (Change change : changes) change(wide);
  // All options of a wide head together: two registers, stored once and read once.
  expect_plans_compile({make_plan(wide, Pass::forward, h200(), "forward/sm90")}, 90, 8);
}

}  // namespace
}  // namespace flash_attention::testing
