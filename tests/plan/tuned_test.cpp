#include "plan/tuned.h"

#include <gtest/gtest.h>

#include <functional>
#include <set>

#include "flash_attention/error.h"

namespace flash_attention::testing {
namespace {

Problem training(std::int64_t head_dim) {
  Problem p{.batch = 2, .seq_q = 1000, .seq_kv = 1000, .heads_q = 4, .heads_kv = 4, .head_dim = head_dim};
  p.dtype = Dtype::bfloat16;
  return p;
}

/// As the planner sees it.
Problem normal(const Problem& problem) {
  Problem p = problem;
  p.head_dim_v = p.head_dim;
  p.scale = 0.125f;
  if (p.causal) p.window_right = 0;
  p.total_q = p.batch * p.seq_q, p.total_kv = p.batch * p.seq_kv;
  return p;
}

DeviceInfo with(DeviceInfo device, const Problem& problem, const plan::Choice& choice, Pass pass = Pass::forward) {
  const std::vector<plan::Tuned::Entry> entries{
      {plan::tuning_form(normal(problem)), pass, {choice, "forward/sm90, 128 x 128", 1.125, 0.01}}};
  device.tuned = std::make_shared<const plan::Tuned>(device, entries);
  return device;
}

TEST(Tuned, is_what_the_plan_has_and_says) {
  const Problem problem = training(128);
  const DeviceInfo by_rules = typical_gpu(90), tuned = with(by_rules, problem, {"forward/sm90", 128, 128, 2, 0});
  const Plan before = make_plan(problem, Pass::forward, by_rules), plan = make_plan(problem, Pass::forward, tuned);
  EXPECT_NE(before.block_kv, 128);
  EXPECT_EQ(plan.block_q, 128);
  EXPECT_EQ(plan.block_kv, 128);
  EXPECT_EQ(plan.tuned, "forward/sm90, 128 x 128, 2 stages: 1.12 times the default, forward/sm90, 128 x 128");
  EXPECT_NE(to_string(plan).find("tuned      forward/sm90, 128 x 128"), std::string::npos);
  EXPECT_TRUE(before.tuned.empty());
  EXPECT_EQ(make_plan(problem, Pass::forward, tuned), plan);  // pure
}

TEST(Tuned, serves_the_same_problem_in_other_layouts_and_no_other_problem) {
  const Problem problem = training(128);
  const DeviceInfo tuned = with(typical_gpu(90), problem, {"forward/sm80", 64, 64, 0, 0});
  const auto is_tuned = [&](const Problem& p) { return !make_plan(p, Pass::forward, tuned).tuned.empty(); };
  EXPECT_TRUE(is_tuned(problem));
  Problem other = problem;
  other.scale = 0.5f;
  other.q_strides = {512 * 1000, 128, 128 * 1000};  // heads first
  EXPECT_TRUE(is_tuned(other));
  for (const auto& change : std::vector<std::function<void(Problem&)>>{
           [](Problem& p) { p.batch = 3; }, [](Problem& p) { p.seq_kv = 1001; }, [](Problem& p) { p.causal = true; },
           [](Problem& p) { p.softcap = 3; }, [](Problem& p) { p.dtype = Dtype::float16; },
           [](Problem& p) { p.heads_kv = 2; }, [](Problem& p) { p.head_dim = 64; },
           [](Problem& p) { p.window_left = 100; }}) {
    Problem changed = problem;
    change(changed);
    EXPECT_FALSE(is_tuned(changed)) << to_string(changed);
  }
}

TEST(Tuned, is_not_used_where_bits_must_not_depend_on_it) {
  Problem problem = training(128);
  problem.invariant = true;
  const DeviceInfo by_rules = typical_gpu(90), tuned = with(by_rules, problem, {"decode/sm80", 0, 0, 0, 0});
  EXPECT_EQ(make_plan(problem, Pass::forward, tuned), make_plan(problem, Pass::forward, by_rules));
}

TEST(Tuned, is_not_used_on_another_device_by_name_or_for_a_kernel_that_was_asked_for) {
  const Problem problem = training(128);
  DeviceInfo tuned = with(typical_gpu(90), problem, {"forward/sm80", 64, 64, 0, 0});
  EXPECT_TRUE(make_plan(problem, Pass::forward, tuned, "forward/portable").tuned.empty());
  tuned.num_sms = 66;
  EXPECT_TRUE(make_plan(problem, Pass::forward, tuned).tuned.empty());
}

/// A file of an older kernel, or of a layout that another kernel does not take: the rules decide.
TEST(Tuned, falls_back_to_the_rules_where_the_kernel_refuses) {
  const Problem problem = training(128);
  const DeviceInfo by_rules = typical_gpu(90);
  const Plan usual = make_plan(problem, Pass::forward, by_rules);
  for (const plan::Choice& choice :
       {plan::Choice{"forward/none", 0, 0, 0, 0}, plan::Choice{"forward/sm90", 192, 128, 0, 0},
        plan::Choice{"forward/sm90", 128, 64, 17, 0}, plan::Choice{"forward/sm90", 0, 0, 1, 0},
        plan::Choice{"forward/sm80", 0, 0, 2, 0}, plan::Choice{"ladder/5", 0, 0, 0, 0},
        plan::Choice{"forward/portable", 64, 64, 0, 0}, plan::Choice{"backward/sm90", 0, 0, 0, 0}}) {
    EXPECT_EQ(make_plan(problem, Pass::forward, with(by_rules, problem, choice)), usual) << to_string(choice);
  }
}

TEST(Tuned, lengths_of_packed_sequences_stand_for_a_range) {
  Problem p = training(64);
  p.packed = true;
  p.seq_q = p.seq_kv = 1000, p.total_q = p.total_kv = 4000, p.batch = 5;
  Problem near = p;
  near.total_q = near.total_kv = 3900;
  near.seq_q = near.seq_kv = 970;
  EXPECT_EQ(plan::tuning_form(near), plan::tuning_form(p));
  near.total_q = 3000;
  EXPECT_NE(plan::tuning_form(near), plan::tuning_form(p));
}

DeviceInfo judged(DeviceInfo device, const std::vector<plan::Verdict>& verdicts) {
  device.tuned = std::make_shared<const plan::Tuned>(device, std::vector<plan::Tuned::Entry>{}, verdicts);
  return device;
}

TEST(Unproven, is_every_kernel_where_it_was_never_run_but_the_last_resort) {
  const Problem problem = training(128);
  EXPECT_FALSE(make_plan(problem, Pass::forward, typical_gpu(90)).unproven);
  EXPECT_FALSE(make_plan(problem, Pass::backward, typical_gpu(90)).unproven);
  for (const int arch : {80, 86, 89, 100, 120}) {
    const DeviceInfo gpu = typical_gpu(arch);
    EXPECT_TRUE(make_plan(problem, Pass::forward, gpu).unproven) << arch;
    EXPECT_TRUE(make_plan(problem, Pass::backward, gpu).unproven) << arch;
    EXPECT_FALSE(make_plan(problem, Pass::forward, gpu, "forward/portable").unproven) << arch;
  }
}

TEST(Unproven, is_not_used_where_only_proven_kernels_are_wanted) {
  const Problem problem = training(128);
  DeviceInfo gpu = typical_gpu(89);
  gpu.proven_only = true;
  const Plan plan = make_plan(problem, Pass::forward, gpu);
  EXPECT_EQ(plan.kernel, "forward/portable");
  EXPECT_FALSE(plan.unproven);
  EXPECT_NE(to_string(plan).find("forward/sm80: was never run on sm_89"), std::string::npos);
  EXPECT_EQ(make_plan(problem, Pass::forward, gpu, "forward/sm80").kernel, "forward/sm80");  // by name it is
  gpu = typical_gpu(90), gpu.proven_only = true;
  EXPECT_EQ(make_plan(problem, Pass::forward, gpu).kernel, "forward/sm90");
}

TEST(Unproven, a_verdict_decides_and_is_for_one_pass_of_one_kernel) {
  const Problem problem = training(128);
  const plan::Verdict passed{"forward/sm80", Pass::forward, true, ""};
  const plan::Verdict failed{"forward/sm80", Pass::forward, false, "out[3] is 7 and should be 1"};
  const DeviceInfo gpu = typical_gpu(89), good = judged(gpu, {passed}), bad = judged(gpu, {failed});
  EXPECT_EQ(make_plan(problem, Pass::forward, good).kernel, "forward/sm80");
  EXPECT_FALSE(make_plan(problem, Pass::forward, good).unproven);
  EXPECT_TRUE(make_plan(problem, Pass::backward, good).unproven);
  const Plan plan = make_plan(problem, Pass::forward, bad);
  EXPECT_EQ(plan.kernel, "forward/portable");
  EXPECT_NE(to_string(plan).find("forward/sm80: failed its self-test on this GPU: out[3] is 7 and should be 1"),
            std::string::npos);
  DeviceInfo careful = good;
  careful.proven_only = true;
  EXPECT_EQ(make_plan(problem, Pass::forward, careful).kernel, "forward/sm80");

  // A tuned choice of a kernel that failed later is not used, and a kernel that would be preferred is not waited for.
  DeviceInfo both = gpu;
  both.tuned = std::make_shared<const plan::Tuned>(
      gpu,
      std::vector<plan::Tuned::Entry>{
          {plan::tuning_form(normal(problem)), Pass::forward, {{"forward/sm80", 64, 64, 0, 0}, "x", 1.5, 0.01}}},
      std::vector{failed});
  EXPECT_EQ(make_plan(problem, Pass::forward, both).kernel, "forward/portable");
}

TEST(Alternatives, begin_with_the_planners_own_and_are_all_different) {
  for (const int arch : {80, 86, 89, 90, 120}) {
    for (const std::int64_t head_dim : {64, 128, 256}) {
      for (const Pass pass : {Pass::forward, Pass::backward}) {
        const DeviceInfo device = typical_gpu(arch);
        Problem problem = normal(training(head_dim));
        problem = [&] {  // strides, as the front door fills them in
          Problem p = problem;
          const Strides strides{1000 * 4 * head_dim, 4 * head_dim, head_dim};
          p.q_strides = p.k_strides = p.v_strides = p.out_strides = strides;
          p.dout_strides = p.dq_strides = p.dk_strides = p.dv_strides = strides;
          p.kv_dtype = p.q_dtype = p.dtype;
          return p;
        }();
        const auto found = plan::alternatives(problem, pass, device);
        ASSERT_GE(found.size(), pass == Pass::forward ? 3u : 1u) << arch << " " << head_dim;
        EXPECT_EQ(found[0].plan.kernel, make_plan(training(head_dim), pass, device).kernel);
        std::set<std::string> texts;
        for (const plan::Alternative& one : found) {
          EXPECT_TRUE(texts.insert(to_string(one.plan) + std::to_string(one.plan.num_splits)).second)
              << to_string(one.choice) << to_string(one.plan);
          for (const Launch& launch : one.plan.launches) EXPECT_LE(launch.shared_bytes, device.shared_bytes);
        }
        EXPECT_LE(found.size(), 40u);
      }
    }
  }
}

}  // namespace
}  // namespace flash_attention::testing
