#include "tuning/tuner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>

#include "api/backends.h"
#include "api/checks/validate.h"
#include "flash_attention/attention.h"
#include "flash_attention/error.h"
#include "flash_attention/tune.h"
#include "support/folder.h"
#include "tuning/store.h"

namespace flash_attention::tuning {
namespace {

/// What is measured here is of no use to anybody: a cache folder of this process alone, before the settings are read.
const testing::TemporaryFolder& own_cache() {
  static const testing::TemporaryFolder folder;
  return folder;
}
const int in_own_cache = ::setenv("FLASH_ATTENTION_CACHE_DIR", own_cache().path().c_str(), 1);

Problem small(Dtype dtype) {
  Problem p{.batch = 2, .seq_q = 67, .seq_kv = 520, .heads_q = 4, .heads_kv = 2, .head_dim = 64};
  p.dtype = dtype;
  p.causal = true;
  return p;
}

Call call_of(const Problem& problem, Pass pass) {
  return {api::normalise(problem, pass), pass, api::normalise(problem, Pass::forward)};
}

/// Runs a kernel and then does something to what it wrote.
class Planted final : public Kernel {
 public:
  Planted(std::unique_ptr<Kernel> kernel, std::function<void(const Problem&, const Buffers&)> harm)
      : kernel_(std::move(kernel)), harm_(std::move(harm)) {}
  void launch(const Problem& problem, const Plan& plan, const Buffers& buffers, const Options& options) const override {
    kernel_->launch(problem, plan, buffers, options);
    harm_(problem, buffers);
  }

 private:
  std::unique_ptr<Kernel> kernel_;
  std::function<void(const Problem&, const Buffers&)> harm_;
};

bool mentions(const std::vector<std::string>& texts, const std::string& what) {
  return std::ranges::any_of(texts, [&](const std::string& text) { return text.find(what) != std::string::npos; });
}

/// A device on which choices take the time that a test gives them.
struct Bench {
  explicit Bench(const Device& device) : info(device_info(device)), backend(api::backend_of(device)) {
    info.tuned.reset();
    tools = tools_of(info, backend);
    tools.seconds = [this](Rig&, const Kernel&, const plan::Alternative& one) {
      const double jitter = 1 + 0.004 * static_cast<double>(++samples % 5);
      const auto known = seconds.find(plan::to_string(one.choice));
      return jitter * (known == seconds.end() ? 1e-3 : known->second);
    };
  }
  TunedCase tune(const Call& call) { return tune_case(call, info, backend, tools, 0.05, {}); }

  DeviceInfo info;
  const Backend& backend;
  Tools tools;
  std::map<std::string, double> seconds;
  int samples = 0;
};

TEST(Tuner, finds_the_fastest_choice_of_every_cpu_problem_and_they_agree) {
  for (const Dtype dtype : {Dtype::float32, Dtype::float16, Dtype::bfloat16}) {
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      Bench bench({});
      const Call call = call_of(small(dtype), pass);
      const auto all = plan::alternatives(call.problem, pass, bench.info);
      if (all.size() < 2) continue;
      bench.seconds[plan::to_string(all.back().choice)] = 0.5e-3;
      const TunedCase tuned = bench.tune(call);
      EXPECT_TRUE(tuned.decided);
      EXPECT_EQ(tuned.result.dropped, std::vector<std::string>{}) << to_string(dtype) << to_string(pass);
      EXPECT_EQ(tuned.result.contestants, static_cast<int>(all.size()));
      EXPECT_EQ(tuned.choice.choice, all.back().choice);
      EXPECT_NEAR(tuned.choice.gain, 2, 0.05);
    }
  }
}

TEST(Tuner, drops_a_choice_that_computes_something_else_and_names_it) {
  struct Harm {
    const char* name;
    std::function<void(const Problem&, const Buffers&)> harm;
  };
  const auto row = [](const Buffers& b, std::int64_t i) { return static_cast<float*>(b.out) + 64 * i; };
  const std::vector<Harm> harms{
      {"one element in ten thousand", [&](const Problem&, const Buffers& b) { row(b, 130)[17] += 0.01f; }},
      {"a row of NaN", [&](const Problem&, const Buffers& b) { std::fill_n(row(b, 77), 64, NAN); }},
      {"all a little", [&](const Problem& p, const Buffers& b) {
         for (std::int64_t i = 0; i < p.batch * p.seq_q * p.heads_q * 64; ++i) row(b, 0)[i] *= 1.0002f;
       }},
      {"lse", [](const Problem&, const Buffers& b) { b.lse[5] += 0.01f; }},
  };
  for (const Harm& planted : harms) {
    Bench bench({});
    const Call call = call_of(small(Dtype::float32), Pass::forward);
    const auto all = plan::alternatives(call.problem, call.pass, bench.info);
    ASSERT_GE(all.size(), 3u);
    const plan::Choice wrong = all[1].choice, right = all[2].choice;
    bench.seconds[plan::to_string(wrong)] = 0.1e-3, bench.seconds[plan::to_string(right)] = 0.8e-3;
    const auto load = bench.tools.load;
    bench.tools.load = [&, load](const Problem& problem, const Plan& plan) -> std::unique_ptr<Kernel> {
      auto kernel = load(problem, plan);
      Plan without = plan;
      if (without != all[1].plan) return kernel;
      return std::make_unique<Planted>(std::move(kernel), planted.harm);
    };
    const TunedCase tuned = bench.tune(call);
    EXPECT_TRUE(mentions(tuned.result.dropped, wrong.kernel)) << planted.name;
    EXPECT_EQ(tuned.result.dropped.size(), 1u) << planted.name;
    EXPECT_EQ(tuned.choice.choice, right) << planted.name;
  }
}

TEST(Tuner, a_choice_that_does_not_compile_is_out_and_the_default_must) {
  Bench bench({});
  const Call call = call_of(small(Dtype::float32), Pass::forward);
  const auto load = bench.tools.load;
  const Plan usual = plan::alternatives(call.problem, call.pass, bench.info)[0].plan;
  bench.tools.load = [&](const Problem& problem, const Plan& plan) -> std::unique_ptr<Kernel> {
    if (plan != usual) throw Error(ErrorCode::compile_failed, "no register is left\nand a long log");
    return load(problem, plan);
  };
  const TunedCase tuned = bench.tune(call);
  EXPECT_TRUE(tuned.decided);
  EXPECT_EQ(tuned.choice.choice.kernel, "");
  EXPECT_EQ(tuned.result.contestants, 1);
  EXPECT_TRUE(mentions(tuned.result.dropped, ": no register is left"));
  EXPECT_FALSE(mentions(tuned.result.dropped, "long log"));
  bench.tools.load = [](const Problem&, const Plan&) -> std::unique_ptr<Kernel> {
    throw Error(ErrorCode::compile_failed, "none");
  };
  EXPECT_THROW(bench.tune(call), Error);
}

TEST(Tuner, says_what_cannot_be_measured) {
  Bench bench({});
  Problem masked = small(Dtype::float32);
  masked.causal = false;
  masked.mask = {.present = true, .q_stride = 520};
  EXPECT_TRUE(bench.tune(call_of(masked, Pass::forward)).result.skipped.find("mask") != std::string::npos);
  Problem invariant = small(Dtype::float32);
  invariant.invariant = true;
  EXPECT_FALSE(bench.tune(call_of(invariant, Pass::forward)).result.skipped.empty());
  EXPECT_EQ(bench.samples, 0);
  EXPECT_THROW(tune({.kind = DeviceKind::emulator, .emulated_arch = 90}, {}), Error);
}

/// Every option that can be measured gives inputs that the kernels take, and kernels that agree.
TEST(Tuner, makes_inputs_for_every_option) {
  const std::vector<std::function<void(Problem&)>> options{
      [](Problem& p) { p.packed = true, p.total_q = 100, p.total_kv = 700; },
      [](Problem& p) { p.seq_q = 1, p.seqused_kv = true, p.page_size = 16, p.num_pages = 90; },
      [](Problem& p) { p.packed = p.seqused_kv = true, p.total_q = 100, p.page_size = 16, p.num_pages = 90; },
      [](Problem& p) { p.seqused_q = p.seqused_kv = true; },
      [](Problem& p) { p.key_lengths = p.left_padding = true, p.causal = false; },
      [](Problem& p) { p.alibi = p.sink = true, p.softcap = 20; },
      [](Problem& p) { p.bias = {true, Dtype::float32, 0, 67 * 520, 520}; },
      [](Problem& p) { p.dropout_p = 0.25f; },
      [](Problem& p) { p.kv_dtype = Dtype::int8, p.kv_scales = ScaleKind::head; },
      [](Problem& p) { p.head_dim_v = 40, p.window_left = 33; },
  };
  for (std::size_t i = 0; i < options.size(); ++i) {
    Problem p = small(Dtype::float32);
    options[i](p);
    Bench bench({});
    const TunedCase tuned = bench.tune(call_of(p, Pass::forward));
    EXPECT_EQ(tuned.result.skipped, "") << i;
    EXPECT_EQ(tuned.result.dropped, std::vector<std::string>{}) << i;
  }
}

/// Through the front door: what was found is used by later calls, and survives the process's cache of plans.
TEST(Tune, changes_the_plans_of_later_calls_and_leaves_invariant_ones) {
  Problem problem = small(Dtype::float32);
  problem.seq_kv = 4096, problem.seq_q = 1, problem.batch = 1;
  const std::string before = explain(problem, Pass::forward);
  EXPECT_EQ(before.find("tuned"), std::string::npos);
  std::vector<std::string> seen;
  const TuneCase one{problem, Pass::forward};
  TuneReport report = tune({}, {&one, 1}, {.seconds = 20, .progress = [&](const TuneProgress& p) { seen.push_back(p.now); }});
  ASSERT_EQ(report.results.size(), 1u);
  EXPECT_TRUE(report.finished);
  EXPECT_EQ(report.results[0].skipped, "");
  EXPECT_EQ(seen.size(), 1u);
  EXPECT_EQ(tune({}, {&one, 1}).results[0].skipped, "tuned before");

  // Whatever it measured, a file of this device says something else now.
  const DeviceInfo here = device_info({});
  const Problem form = plan::tuning_form(api::normalise(problem, Pass::forward));
  const TunedFile file{.place = place_of(here, ""),
                       .entries = {{form, Pass::forward, {{"cpu/prefill", 0, 0, 0, 3}, "cpu/decode", 1.5, 0.01}}},
                       .verdicts = {}};
  EXPECT_EQ(import_tuned({}, to_text(file), "f.json"), 1u);
  const std::string after = explain(problem, Pass::forward);
  EXPECT_NE(after.find("tuned      cpu/prefill, keys in 3 parts: 1.50 times the default, cpu/decode"), std::string::npos)
      << after;
  EXPECT_NE(export_tuned({}).find("\"kernel\": \"cpu/prefill\""), std::string::npos);
  Problem invariant = problem;
  invariant.invariant = true;
  EXPECT_EQ(explain(invariant, Pass::forward).find("tuned"), std::string::npos);

  DeviceInfo foreign = here;
  foreign.name = "another CPU";
  EXPECT_THROW(import_tuned({}, to_text({.place = place_of(foreign, ""), .entries = {}, .verdicts = {}}), "g.json"), Error);
  EXPECT_THROW(import_tuned({}, "{}", "h.json"), Error);
}

TEST(Tune, keeps_what_it_has_when_it_is_stopped) {
  std::vector<TuneCase> cases;
  for (const std::int64_t seq : {40, 50, 60}) {
    cases.push_back({{.seq_q = seq, .seq_kv = seq, .head_dim = 32}, Pass::forward});
  }
  int done = 0;
  const TuneReport report =
      tune({}, cases, {.seconds = 60, .stops = [&] { return done >= 1; }, .result = [&](const TuneResult&) { ++done; }});
  EXPECT_FALSE(report.finished);
  EXPECT_EQ(report.results.size(), 1u);
  const TuneReport rest = tune({}, cases, {.seconds = 60});
  ASSERT_EQ(rest.results.size(), 3u);
  EXPECT_TRUE(rest.finished);
  EXPECT_EQ(rest.results[0].skipped, "tuned before");
  EXPECT_EQ(rest.results[1].skipped, "");
  EXPECT_TRUE(tune({}, cases, {.seconds = 0}).results.empty());
}

}  // namespace
}  // namespace flash_attention::tuning
