#include "plan/ladder/ladder.h"

#include <gtest/gtest.h>

#include "flash_attention/error.h"
#include "jit/embedded.h"

namespace flash_attention::testing {
namespace {

DeviceInfo gpu(int arch) {
  return {.device = {.kind = DeviceKind::cuda}, .arch = arch, .num_sms = 132, .shared_bytes = 227 << 10};
}

Problem plain_for(const plan::Rung& rung) {
  Problem p{.batch = 2, .seq_q = 100, .seq_kv = 300, .heads_q = 4, .heads_kv = 2, .head_dim = 64, .dtype = Dtype::bfloat16};
  if (rung.narrow) p.q_dtype = p.kv_dtype = Dtype::float8_e4m3;
  return p;
}

std::string refusal(const Problem& problem, const plan::Rung& rung, const DeviceInfo& device) {
  try {
    make_plan(problem, rung.pass, device, rung.name);
  } catch (const Error& error) {
    return error.code() == ErrorCode::unsupported ? error.what() : std::string("wrong code: ") + error.what();
  }
  return "";
}

TEST(Ladder, RungsServeByNameAndOnlyByName) {
  for (const plan::Rung& rung : plan::rungs()) {
    EXPECT_EQ(make_plan(plain_for(rung), rung.pass, gpu(90), rung.name).kernel, rung.name);
    const Plan chosen = make_plan(plain_for(rung), rung.pass, gpu(90));
    for (const Candidate& candidate : chosen.candidates) EXPECT_FALSE(candidate.kernel.starts_with("ladder/"));
  }
}

TEST(Ladder, RefusesWhatItDoesNotTakeAndSaysWhy) {
  struct Refused {
    const char* why;
    void (*change)(Problem&);
  };
  const std::vector<Refused> all{
      {"no window", [](Problem& p) { p.window_left = 10; }},
      {"top-left", [](Problem& p) { p.causal = true, p.alignment = Alignment::top_left; }},
      {"no bias", [](Problem& p) { p.alibi = true; }},
      {"soft cap", [](Problem& p) { p.softcap = 5; }},
      {"no dropout", [](Problem& p) { p.dropout_p = 0.5f; }},
      {"no sink", [](Problem& p) { p.sink = true; }},
      {"shortened sequences", [](Problem& p) { p.key_lengths = true; }},
      {"head_dim_v = head_dim", [](Problem& p) { p.head_dim_v = 32; }},
      {"at most 128", [](Problem& p) { p.head_dim = p.head_dim_v = 192; }},
      {"positive scale", [](Problem& p) { p.scale = -1.0f; }},
  };
  for (const plan::Rung& rung : plan::rungs()) {
    for (const Refused& refused : all) {
      Problem problem = plain_for(rung);
      refused.change(problem);
      EXPECT_NE(refusal(problem, rung, gpu(90)).find(refused.why), std::string::npos) << rung.name << ": " << refused.why;
    }
    EXPECT_NE(refusal(plain_for(rung), rung, gpu(75)).find("needs sm_"), std::string::npos) << rung.name;
  }
}

TEST(Ladder, TakesFloat32WhereItSaysSo) {
  for (const plan::Rung& rung : plan::rungs()) {
    Problem problem = plain_for(rung);
    problem.dtype = Dtype::float32;
    EXPECT_EQ(refusal(problem, rung, gpu(90)).empty(), rung.float32) << rung.name;
  }
}

TEST(Ladder, TakesEightBitsWhereItSaysSo) {
  for (const plan::Rung& rung : plan::rungs()) {
    if (rung.pass == Pass::backward) continue;
    Problem problem = plain_for(rung);
    problem.q_dtype = problem.kv_dtype = rung.narrow ? std::optional<Dtype>() : Dtype::float8_e4m3;
    EXPECT_NE(refusal(problem, rung, gpu(90)), "") << rung.name;
    problem = plain_for(rung);
    problem.kv_scales = ScaleKind::head;
    if (!rung.narrow) continue;
    EXPECT_NE(refusal(problem, rung, gpu(90)).find("without scales"), std::string::npos) << rung.name;
  }
}

/// The idea / from the rung before / what it buys / what limits it now.
TEST(Ladder, EveryRungHasAHeadOfFourLines) {
  for (const plan::Rung& rung : plan::rungs()) {
    std::string_view text;
    for (const jit::EmbeddedFile& file : jit::embedded_files()) {
      if (file.name == plan::unit_of(rung) + ".cu") text = file.text;
    }
    std::vector<std::string_view> lines;
    for (std::string_view rest = text; !rest.empty() && lines.size() < 7;) {
      lines.push_back(rest.substr(0, rest.find('\n')));
      rest.remove_prefix(lines.back().size() + 1);
    }
    ASSERT_EQ(lines.size(), 7u) << rung.name;
    EXPECT_TRUE(lines[2].starts_with("// The idea:")) << rung.name;
    EXPECT_TRUE(lines[3].starts_with("// From ") || lines[3].starts_with("// Before it:")) << rung.name;
    EXPECT_TRUE(lines[4].starts_with("// It buys:")) << rung.name;
    EXPECT_TRUE(lines[5].starts_with("// The limit:")) << rung.name;
    EXPECT_TRUE(lines[6].empty() || lines[6] == "//") << rung.name << ": a fifth line";
  }
}

}  // namespace
}  // namespace flash_attention::testing
