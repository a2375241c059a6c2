#include "check/check.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "api/checks/validate.h"
#include "check/program_score.h"
#include "check/sample.h"
#include "check/sums.h"
#include "flash_attention/error.h"
#include "support/cases/contract.h"
#include "support/cases/make_case.h"
#include "support/oracle/case_programs.h"
#include "support/oracle/tensors.h"

namespace flash_attention::testing {
namespace {

const char* in_place(const void* from, std::size_t, std::vector<char>&) { return static_cast<const char*>(from); }

/// The results of a call with one of them changed: seen, if its row is among the samples of some turn.
class Changed {
 public:
  /// The kernel is given `done`, which may lack an option that the case has.
  Changed(const Case& c, Pass pass, const Problem& done)
      : case_(c), pass_(pass), in_(draw_inputs(c)), memory_(memory_of({})) {
    tensors_ = std::make_unique<Tensors>(case_, in_, *memory_);
    if (pass == Pass::backward) tensors_->set_forward(oracle(case_, in_, false));
    Options options{.seed = c.dropout_seed, .offset = c.dropout_offset};
    options.workspace_bytes = workspace_bytes(done, pass, options);
    options.workspace = memory_->allocate(options.workspace_bytes + 1);
    Buffers b = tensors_->buffers();
    if (!done.bias.present) b.bias = b.dbias = nullptr;
    if (!done.mask.present) b.mask = nullptr;
    if (done.hidden_rows.bounds == 0) b.hidden_rows = nullptr;
    if (done.block_mask.block_q == 0) b.block_mask = nullptr;
    if (!done.alibi) b.alibi_slopes = nullptr;
    if (done.program.empty()) b.program_tensors = nullptr, b.program_scalars = nullptr, b.program_gradients = nullptr;
    if (!done.sink) b.sink = b.dsink = nullptr;
    if (!done.key_lengths) b.key_lengths = nullptr;
    if (!done.seqused_q) b.seqused_q = nullptr;
    if (!done.seqused_kv) b.seqused_kv = nullptr;
    if (pass == Pass::forward)
      b.dout = nullptr, b.dlse = nullptr, b.dq = b.dk = b.dv = b.dbias = nullptr, b.dsink = nullptr;
    try {
      (pass == Pass::forward ? forward : backward)(done, b, options);
    } catch (const Error&) {  // by the watchdog, where the environment has turned it on: the results are there
    }
  }
  Changed(const Case& c, Pass pass) : Changed(c, pass, c.problem) {}

  std::string check_all() const {
    const Problem p = api::normalise(case_.problem, pass_);
    const Options options{.seed = case_.dropout_seed, .offset = case_.dropout_offset};
    try {
      for (std::uint64_t turn = 0; turn < 40; ++turn) {
        check::check({p, tensors_->buffers(), options, in_place}, pass_, "the kernel", turn);
      }
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }

  const Buffers& buffers() const { return tensors_->buffers(); }

 private:
  Case case_;
  Pass pass_;
  Inputs in_;
  std::unique_ptr<Memory> memory_;
  std::unique_ptr<Tensors> tensors_;
};

Case plain() {
  Case c;
  c.name = "plain";
  c.problem = {.batch = 2, .seq_q = 9, .seq_kv = 11, .heads_q = 2, .heads_kv = 1, .head_dim = 16};
  return c;
}

void expect_seen(const Case& c, Pass pass, void* (*tensor)(const Buffers&), std::int64_t elements, const char* name) {
  Changed call(c, pass);
  ASSERT_EQ(call.check_all(), "") << name;
  auto* values = static_cast<float*>(tensor(call.buffers()));
  for (const std::int64_t at : {std::int64_t{0}, elements / 2, elements - 1}) {
    for (const float wrong : {values[at] + 0.01f * std::max(1.0f, std::fabs(values[at])), -values[at] - 1,
                              static_cast<float>(NAN), static_cast<float>(INFINITY)}) {
      const float right = values[at];
      values[at] = wrong;
      EXPECT_NE(call.check_all().find(std::string(" in ") + name + "["), std::string::npos)
          << name << " " << at << " " << wrong;
      values[at] = right;
    }
  }
}

TEST(Check, SeesAWrongNumberInEveryTensor) {
  const Case c = plain();
  expect_seen(
      c, Pass::forward, [](const Buffers& b) -> void* { return b.out; }, 2 * 9 * 2 * 16, "out");
  expect_seen(
      c, Pass::forward, [](const Buffers& b) -> void* { return b.lse; }, 2 * 2 * 9, "lse");
  expect_seen(
      c, Pass::backward, [](const Buffers& b) -> void* { return b.dq; }, 2 * 9 * 2 * 16, "dq");
  expect_seen(
      c, Pass::backward, [](const Buffers& b) -> void* { return b.dk; }, 2 * 11 * 16, "dk");
  expect_seen(
      c, Pass::backward, [](const Buffers& b) -> void* { return b.dv; }, 2 * 11 * 16, "dv");
}

TEST(Check, SeesAWrongLseBesideTheLowestBiases) {
  Case c = plain();
  c.problem.bias = {.present = true, .q_stride = 11};
  c.lowest_bias = true;
  Changed call(c, Pass::forward);
  ASSERT_EQ(call.check_all(), "");
  float* const lowest = std::min_element(call.buffers().lse, call.buffers().lse + 2 * 2 * 9);
  EXPECT_FLOAT_EQ(*lowest, -2.3e38f);
  *lowest = -2.2e38f;
  EXPECT_NE(call.check_all().find(" in lse["), std::string::npos);
}

/// With every way to broadcast, and sums over more rows than are read at once.
TEST(Check, SeesAWrongSumOverRows) {
  for (const std::string axes : {"", "q", "h", "b", "hq", "bhq"}) {
    const auto has = [&](char axis) { return axes.find(axis) != std::string::npos; };
    Case c = plain();
    Problem& p = c.problem;
    p.seq_q = axes.empty() ? 600 : 3, p.causal = p.sink = true;
    c.dbias = c.dsink = c.dlse = true;
    p.bias = over(p, has('b'), has('h'), has('q'));
    SCOPED_TRACE(axes);
    const std::int64_t elements = (has('b') ? 2 : 1) * (has('h') ? 2 : 1) * (has('q') ? p.seq_q : 1) * p.seq_kv;
    expect_seen(
        c, Pass::backward, [](const Buffers& b) -> void* { return b.dbias; }, elements, "dbias");
    expect_seen(
        c, Pass::backward, [](const Buffers& b) -> void* { return b.dsink; }, 2, "dsink");
  }
}

/// One sum over all of this takes minutes in fp64: the others are still looked at.
TEST(Check, DrawsNoSumThatIsTooMuchWork) {
  Problem p{.batch = 1, .seq_q = 1 << 20, .seq_kv = 64, .heads_q = 32, .heads_kv = 32, .head_dim = 128, .sink = true};
  p.bias = {.present = true};
  p = api::normalise(p, Pass::backward);
  const check::Call call(p, {}, {}, in_place);
  EXPECT_TRUE(check::some_biases(call, 3).empty());
  EXPECT_EQ(check::some_sinks(call, 3).size(), 1u);
}

/// A kernel that does not know an option computes another problem.
TEST(Check, SeesThatAnOptionWasForgotten) {
  struct Option {
    const char* name;
    void (*set)(Case&);
  };
  const Option options[] = {
      {"causal", [](Case& c) { c.problem.causal = true; }},
      {"window", [](Case& c) { c.problem.window_left = 2; }},
      {"alignment", [](Case& c) { c.problem.causal = true, c.problem.alignment = Alignment::top_left; }},
      {"softcap", [](Case& c) { c.problem.softcap = 0.5f; }},
      {"scale", [](Case& c) { c.problem.scale = 0.3f; }},
      {"alibi", [](Case& c) { c.problem.alibi = true; }},
      {"sink", [](Case& c) { c.problem.sink = true; }},
      {"dropout", [](Case& c) { c.problem.dropout_p = 0.3f; }},
      {"bias", [](Case& c) { c.problem.bias = {.present = true, .q_stride = 11}; }},
      {"mask", [](Case& c) { c.problem.mask = {.present = true, .q_stride = 11}; }},
      {"hidden_rows", [](Case& c) { c.problem.hidden_rows.bounds = 2; }},
      {"block_mask", [](Case& c) { c.problem.block_mask = {.block_q = 2, .block_kv = 3, .q_stride = 4}; }},
      {"key_lengths",
       [](Case& c) {
         c.problem.key_lengths = true, c.key_lengths = {11, 5};
       }},
      {"seqused_kv",
       [](Case& c) {
         c.problem.seqused_kv = true, c.seqused_kv = {11, 5};
       }},
      {"seqused_q",
       [](Case& c) {
         c.problem.seqused_q = true, c.seqused_q = {9, 5};
       }},
  };
  for (const Option& option : options) {
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      Case with = plain();
      option.set(with);
      Changed call(with, pass);
      EXPECT_EQ(call.check_all(), "") << option.name;
      if (pass == Pass::backward && with.problem.sink) continue;  // lse tells the whole of it
      EXPECT_NE(Changed(with, pass, plain().problem).check_all(), "") << option.name << " " << to_string(pass);
    }
  }
}

/// The programs of the covering arrays: right results pass, also beside a bias and softcap; those of another program do
/// not.
TEST(Check, SeesWhatAProgramMakesOfScores) {
  for (const CaseProgram kind : {CaseProgram::distance, CaseProgram::squashed, CaseProgram::dilated, CaseProgram::documents,
                                 CaseProgram::both, CaseProgram::hides}) {
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      for (const bool more : {false, true}) {
        Case c = plain();
        c.problem.seq_q = 90, c.problem.seq_kv = 95;
        c.program = kind;
        if (more) {
          c.problem.softcap = 2, c.dbias = true;
          c.problem.bias = {.present = true, .q_stride = 95};
        }
        const Problem without = c.problem;
        describe_program(c);
        SCOPED_TRACE(std::string(to_string(pass)) + (more ? " with a bias of " : " of ") + c.problem.program);
        EXPECT_EQ(Changed(c, pass).check_all(), "");
        EXPECT_NE(Changed(c, pass, without).check_all(), "");
      }
    }
  }
}

/// A comparison of floats that are equal but for rounding may fall on either side: nothing can be said of such rows.
TEST(Check, SaysNothingOfARowWhoseProgramMayChooseEitherWay) {
  Case c = plain();
  c.problem.program = "m = max score 0.0\np = gt m score\nr = where p -9.0 m\nq = ge m score\nt = where q r 7.0\nscore = t";
  const Problem p = api::normalise(c.problem, Pass::forward);
  const Inputs in = draw_inputs(c);
  const auto memory = memory_of({});
  const Tensors tensors(c, in, *memory);
  const check::Call call(p, tensors.buffers(), {}, in_place);
  const check::ProgramScore scores(call);
  EXPECT_FLOAT_EQ(scores.at({0, 0, 1, 2}, -0.5, 1e-6).score.real, -9);
  EXPECT_TRUE(std::isfinite(scores.at({0, 0, 1, 2}, -0.5, 1e-6).score.real));
  EXPECT_GE(scores.at({0, 0, 1, 2}, 0.5, 1e-6).score.error, 6) << "p and q are open: 0.5, -9 or 7";
}

TEST(Check, SamplesTheFirstAndTheLastAndOverTimeAllRows) {
  Case c = plain();
  const Inputs in = draw_inputs(c);
  const auto memory = memory_of({});
  const Tensors tensors(c, in, *memory);
  const Problem p = api::normalise(c.problem, Pass::backward);
  const check::Call call(p, tensors.buffers(), {}, in_place);
  const auto contains = [](const std::vector<check::Place>& places, check::Place place) {
    return std::find(places.begin(), places.end(), place) != places.end();
  };
  std::set<std::int64_t> queries, keys;
  for (std::uint64_t turn = 0; turn < 400; ++turn) {
    const auto rows = check::some_queries(call, turn), columns = check::some_keys(call, turn);
    EXPECT_LE(rows.size(), 16u);
    EXPECT_LE(columns.size(), 6u);
    EXPECT_TRUE(contains(rows, {0, 0, 0}) && contains(rows, {1, 1, 8})) << turn;
    EXPECT_TRUE(contains(columns, {0, 0, 0}) && contains(columns, {1, 0, 10})) << turn;
    for (const auto& [b, head, row] : rows) queries.insert((b * 2 + head) * 9 + row);
    for (const auto& [b, head, row] : columns) keys.insert(b * 11 + row);
  }
  EXPECT_EQ(queries.size(), 2u * 2 * 9);
  EXPECT_EQ(keys.size(), 2u * 11);
}

}  // namespace
}  // namespace flash_attention::testing
