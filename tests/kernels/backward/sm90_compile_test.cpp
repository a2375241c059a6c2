// What the planner gives backward/sm90 compiles, spills nothing, and no wgmma is serialised: one configuration for each
// structure, with the kernels before and after the main one, and all light options together; all of them in the long tail.
#include "kernels/sm90_compile.h"

#include "support/long_tail.h"

namespace flash_attention::testing {
namespace {

/// Which launches of a plan: the kernels before and after the main one differ little by what the problems of a test differ
/// in, and need few registers.
enum class Launches { all, main };

void expect_backward_compiles(const std::vector<Problem>& problems, int allowed_spill_bytes = 0,
                              Launches taken = Launches::main) {
  if (const std::string reason = why_no_compiler(); !reason.empty()) GTEST_SKIP() << reason;
  std::vector<Plan> plans;
  for (const Problem& p : problems) {
    plans.push_back(make_plan(p, Pass::backward, h200(), "backward/sm90"));
    // The portable kernels among the launches have tests of their own.
    // dK of heads wider than 256 spills five registers, whatever its options.
    const bool all = taken == Launches::all || with_long_tail();
    std::erase_if(plans.back().launches, [all](const Launch& launch) {
      const bool main = launch.unit != "backward/sm90/prepare" && launch.unit != "backward/sm90/repair";
      return !launch.unit.starts_with("backward/sm90") || launch.entry == "backward_sm90_columns_dk" || !(main || all);
    });
  }
  expect_plans_compile(plans, 90, allowed_spill_bytes);
}

TEST(BackwardSm90Compiles, HeadDims) {
  std::vector<Problem> problems;
  for (const std::int64_t dim : {8, 64, 96, 128, 192, 256}) {
    const bool structure_of_its_own = dim == 64 || dim == 128 || dim == 256;
    if (structure_of_its_own) problems.push_back(problem(dim));
    if (!with_long_tail()) continue;
    for (const bool causal : {false, true}) problems.push_back(problem(dim, causal));
    if (dim > 128) continue;  // deterministic in any case
    problems.push_back(problem(dim, false));
    problems.back().deterministic = true;
  }
  for (const std::int64_t dim : {128, 64}) {
    if (dim == 64 && !with_long_tail()) break;
    for (const bool causal : {false, true}) {
      if (causal && !with_long_tail()) continue;
      problems.push_back(problem(dim, causal));
      problems.back().heads_kv = 8;  // one query head to each: dK and dV are complete in a task
      if (!causal && with_long_tail()) problems.push_back(problems.back()), problems.back().seq_q = 256;  // heads in turn
    }
    for (const std::int64_t heads_kv : {2, 8}) {  // a group that is split, and none
      if (heads_kv == 8 && !with_long_tail()) continue;
      problems.push_back(problem(dim));
      problems.back().heads_kv = heads_kv, problems.back().deterministic = true;
    }
  }
  problems.push_back(problem(512));
  if (with_long_tail()) {
    problems.push_back(problem(192));
    problems.back().head_dim_v = 128;
    problems.push_back(problem(320, false));
    problems.push_back(problem(128));
    problems.back().dtype = Dtype::float16;
  }
  for (const std::int64_t dim : {64, 128}) {  // dQ of early heads is converted while later ones are computed
    problems.push_back(problem(dim, true));
    problems.back().batch = 4, problems.back().seq_q = problems.back().seq_kv = 4096;
    problems.back().heads_q = problems.back().heads_kv = 32;
    EXPECT_GT(make_plan(problems.back(), Pass::backward, h200(), "backward/sm90").early_heads, 0);
  }
  expect_backward_compiles(problems, 0, Launches::all);
}

// One tile of keys: prepare, convert and repair are parts of the kernel.
TEST(BackwardSm90Compiles, Direct) {
  using Change = void (*)(Problem&);
  const Change changes[] = {
      [](Problem&) {},
      [](Problem& p) { p.dropout_p = 0.1f; },
      [](Problem& p) { p.heads_kv = 4; },
      [](Problem& p) { p.causal = false; },
      [](Problem& p) { p.softcap = 20; },
      [](Problem& p) { p.alibi = true; },
  };
  std::vector<Problem> problems;
  for (const std::int64_t dim : {128, 64, 96, 8}) {
    std::ptrdiff_t taken = with_long_tail() ? std::ssize(changes) : dim == 128 ? 1 : 0;
    for (const Change change : changes) {
      if (taken-- <= 0) break;
      problems.push_back(problem(dim));
      problems.back().seq_q = problems.back().seq_kv = 128;
      change(problems.back());
    }
  }
  expect_backward_compiles(problems);
}

TEST(BackwardSm90Compiles, Options) {
  using Change = void (*)(Problem&);
  const Change changes[] = {
      [](Problem& p) { p.bias = {.present = true, .dtype = Dtype::float32, .q_stride = 1024}; },
      [](Problem& p) { p.dropout_p = 0.1f; },
      [](Problem& p) { p.softcap = 20; },
      [](Problem& p) { p.packed = true, p.total_q = p.total_kv = 2000; },
      [](Problem& p) { p.window_left = 100; },
      [](Problem& p) { p.alibi = true; },
      [](Problem& p) { p.mask = {.present = true, .q_stride = 1024}; },
  };
  std::vector<Problem> problems;
  for (const std::int64_t dim : {64, 128, 256}) {
    std::ptrdiff_t alone = with_long_tail() ? std::ssize(changes) : dim == 128 ? 1 : 0;  // the others: LightOptions
    for (const Change change : changes) {
      if (alone-- <= 0) break;
      problems.push_back(problem(dim));
      change(problems.back());
    }
  }
  expect_backward_compiles(problems);
}

// A bias of 16 bits by itself: by TMA at 64, loaded in pairs at 128 beside dQ, above it in both loops.
TEST(BackwardSm90Compiles, Biases) {
  std::vector<Problem> problems;
  for (const std::int64_t dim : {64, 128, 256}) {
    for (const bool causal : {false, true}) {
      if (!with_long_tail() && (dim == 256 || causal != (dim == 64))) continue;
      problems.push_back(problem(dim, causal));
      problems.back().bias = {.present = true, .dtype = Dtype::bfloat16, .q_stride = 1024};
    }
  }
  expect_backward_compiles(problems);
}

// Options that read no memory keep the structure of plain scores: with each, and with what takes registers besides.
TEST(BackwardSm90Compiles, LightOptions) {
  using Change = void (*)(Problem&);
  const Change options[] = {
      [](Problem& p) { p.alibi = true; },
      [](Problem& p) { p.softcap = 20; },
      [](Problem& p) { p.dropout_p = 0.1f; },
      [](Problem& p) { p.alibi = true, p.softcap = 20, p.dropout_p = 0.1f; },
  };
  const Change others[] = {
      [](Problem& p) { p.packed = true, p.total_q = p.total_kv = 2000; },
      [](Problem& p) { p.heads_kv = 8, p.causal = false; },
      [](Problem& p) { p.window_left = 100; },
      [](Problem& p) { p.seqused_q = p.seqused_kv = true; },
      [](Problem& p) { p.deterministic = true; },
      [](Problem& p) { p.deterministic = true, p.heads_kv = 8; },
      [](Problem& p) { p.causal = false; },
      [](Problem& p) { p.head_dim_v = 64; },
  };
  // Two registers are spilled at head_dim 96, and at 64 by dropout with lengths: less than a kernel for dQ alone would
  // cost.
  constexpr int two_registers = 8;
  std::vector<Problem> problems, crowded;
  for (const std::int64_t dim : {64, 96, 128}) {
    for (const Change& option : options) {
      std::ptrdiff_t number = 0;
      for (const Change other : others) {
        const bool all_together = &option == std::end(options) - 1;
        if (!with_long_tail() && (dim != 128 || !all_together || number++ > 0)) break;
        Problem p = problem(dim);
        option(p);
        other(p);
        const bool lengths = p.packed || p.seqused_q;
        (dim == 96 || (dim == 64 && lengths && p.dropout_p > 0) ? crowded : problems).push_back(p);
      }
    }
  }
  expect_backward_compiles(problems, 0, Launches::all);
  expect_backward_compiles(crowded, two_registers, Launches::all);
}

}  // namespace
}  // namespace flash_attention::testing
