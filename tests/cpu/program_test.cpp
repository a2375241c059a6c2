#include <gtest/gtest.h>

#include "flash_attention/c_api.h"
#include "support/cases/programs.h"

namespace flash_attention::testing {
namespace {

// Random programs on the CPU, forward and backward, against fp64.
TEST(CpuPrograms, RandomProgramsAgreeWithFp64) {
  for (unsigned seed = 0; seed < 24; ++seed) {
    const RandomProgram random(1000 + seed, seed % 4 != 1, seed % 4 != 2);
    Problem problem{
        .batch = 1 + seed % 2, .seq_q = 29 + seed, .seq_kv = 70, .heads_q = 2, .heads_kv = 1 + seed % 2, .head_dim = 16};
    problem.causal = seed % 3 == 0;
    if (seed % 5 == 0) problem.seq_q = 37;
    const ProgramResults got = run_program(problem, random, {}, seed);
    const ProgramResults expected = exact_program(problem, random, seed);
    const std::string text = random.text + "seed " + std::to_string(seed);
    EXPECT_LT(difference(got.out, expected.out), 1e-4) << text;
    EXPECT_LT(difference(got.lse, expected.lse), 1e-4) << text;
    EXPECT_LT(difference(got.dq, expected.dq), 2e-4) << text;
    EXPECT_LT(difference(got.dk, expected.dk), 2e-4) << text;
    EXPECT_LT(difference(got.dv, expected.dv), 2e-4) << text;
    if (problem.seq_q > 40) continue;
    EXPECT_LT(difference(got.dreals, expected.dreals), 2e-3) << text;
  }
}

// Tiles are asked for eight at a time, and lose the keys at their ends that no row sees: hidden runs and open ones, edges
// of documents inside of tiles, and a few keys that all rows see far from these.
TEST(CpuPrograms, LongDocumentsAgreeWithFp64) {
  for (const int length : {91, 150}) {
    const std::string n = std::to_string(length);
    const RandomProgram documents("a = floordiv i " + n + "\nb = floordiv j " + n +
                                  "\nsame = eq a b\nfirst = lt j 21\nv = or same first\nvisible = v");
    Problem problem{.batch = 1, .seq_q = 211, .seq_kv = 1301, .heads_q = 1, .heads_kv = 1, .head_dim = 8};
    problem.causal = length == 150;  // aligned at the end: all keys but the last are seen
    const ProgramResults got = run_program(problem, documents, {}, 7), expected = exact_program(problem, documents, 7);
    EXPECT_LT(difference(got.out, expected.out), 1e-4) << n;
    EXPECT_LT(difference(got.lse, expected.lse), 1e-4) << n;
    EXPECT_LT(difference(got.dq, expected.dq), 2e-4) << n;
    EXPECT_LT(difference(got.dk, expected.dk), 2e-4) << n;
    EXPECT_LT(difference(got.dv, expected.dv), 2e-4) << n;
  }
}

/// In bfloat16: what the formula gives, with P and dS rounded.
void expect_close(const ProgramResults& got, const ProgramResults& expected, const std::string& text) {
  EXPECT_LT(difference(got.out, expected.out), 0.02) << text;
  EXPECT_LT(difference(got.lse, expected.lse), 0.001) << text;
  EXPECT_LT(difference(got.dq, expected.dq), 0.02) << text;
  EXPECT_LT(difference(got.dk, expected.dk), 0.02) << text;
  EXPECT_LT(difference(got.dv, expected.dv), 0.02) << text;
}

TEST(CpuPrograms, InBfloat16) {
  for (unsigned seed = 0; seed < 12; ++seed) {
    const RandomProgram random(2000 + seed, seed % 3 != 1, seed % 3 != 2);
    const Problem problem{.batch = 1,
                          .seq_q = 61 + seed,
                          .seq_kv = 150,
                          .heads_q = 2,
                          .heads_kv = 1 + seed % 2,
                          .head_dim = 16,
                          .dtype = Dtype::bfloat16,
                          .causal = seed % 2 == 0};
    expect_close(run_program(problem, random, {}, seed), exact_program(problem, random, seed), random.text);
  }
}

// Keys that the program hides are NaN, some of them beside keys that are seen.
TEST(CpuPrograms, HiddenKeysMayBeNaN) {
  for (const Dtype dtype : {Dtype::float32, Dtype::bfloat16}) {
    const RandomProgram given(
        "a = floordiv i 50\nb = floordiv j 50\nsame = eq a b\nm = mod j 7\nc = ne m 0\nv = and same c\nvisible = v");
    const Problem problem{.batch = 1, .seq_q = 130, .seq_kv = 130, .head_dim = 16, .dtype = dtype};
    const ProgramResults got = run_program(problem, given, {}, 3, {.poison = 7});
    expect_close(got, exact_program(problem, given, 3), given.text);
  }
}

TEST(CpuPrograms, ProductsOfPairsTakeThem) {
  Problem problem{.seq_q = 64, .seq_kv = 64, .head_dim = 16, .dtype = Dtype::bfloat16};
  problem.program = "t0 = tensor float32 1\nx = load t0 j\nv = add score x\nscore = v";
  problem.program_sizes[0][0] = 64;
  DeviceInfo device;
  for (const CpuIsa isa : {CpuIsa::amx, CpuIsa::avx512_bf16}) {
    device.isa = isa;
    problem.program_gradients = 0;
    EXPECT_EQ(make_plan(problem, Pass::forward, device).kernel, "cpu/bfloat16");
    EXPECT_EQ(make_plan(problem, Pass::backward, device).kernel, "cpu/bfloat16");
    problem.program_gradients = 1;
    EXPECT_EQ(make_plan(problem, Pass::backward, device).kernel, "cpu/backward");
  }
}

TEST(CpuPrograms, ExplainShowsTheText) {
  Problem problem{.seq_q = 64, .seq_kv = 64, .head_dim = 16};
  problem.program = "v = neg score\nscore = v";
  const std::string text = explain(problem, Pass::forward);
  EXPECT_NE(text.find("program of 2 lines"), std::string::npos) << text;
  EXPECT_NE(text.find("v = neg score"), std::string::npos) << text;
  EXPECT_NE(text.find("cpu/decode: takes no program"), std::string::npos) << text;
}

const char* const alibi_text =
    "t0 = tensor float32 1\nx = load t0 h\nd = sub i j\na = abs d\nf = float a\ny = mul x f\nz = sub score y\n";

// A score that is an option is computed as that option, which explain says, and agrees with fp64.
TEST(CpuPrograms, ScoresThatAreOptionsAgreeWithFp64) {
  struct Lowered {
    std::string text;
    const char* said;       // by explain
    const char* rest = "";  // of the program
    std::int64_t seq_kv = 37;
  };
  const Lowered lowered[] = {
      {std::string(alibi_text) + "score = z", ", alibi"},
      {std::string(alibi_text) + "v = ge i j\nscore = z\nvisible = v", ", alibi"},
      {std::string(alibi_text) + "m = mod j 3\nv = ne m 1\nscore = z\nvisible = v", ", alibi", "visible = v"},
      {"t0 = tensor float32 1\nx = load t0 h\nd = sub j i\nf = float d\ny = mul x f\nz = add score y\nv = ge i j\n"
       "score = z\nvisible = v",
       ", alibi"},
      {"t0 = tensor float32 1\nx = load t0 h\ne = sub i j\nd = add e 33\na = abs d\nf = float a\ny = mul x f\n"
       "z = sub score y\nscore = z",
       ", alibi", "", 70},
      {"x = div score 0.75\ny = tanh x\nz = mul y 0.75\nscore = z", ", softcap 0.75", "", 70},
      {"t0 = tensor float32 1\nu = div score 0.75\nt = tanh u\nc = mul t 0.75\nx = load t0 h\nd = sub i j\na = abs d\n"
       "f = float a\ny = mul x f\nz = sub c y\nscore = z",
       ", softcap 0.75, alibi"},
  };
  for (const Lowered& c : lowered) {
    RandomProgram given(c.text);
    given.with_gradient = false;
    const Problem problem{
        .batch = 2, .seq_q = 37, .seq_kv = c.seq_kv, .heads_q = 4, .heads_kv = 2, .head_dim = 16, .dtype = Dtype::float32};
    Problem described = problem;
    given.describe(described);
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      const std::string text = explain(described, pass);
      EXPECT_NE(text.find(c.said), std::string::npos) << text;
      EXPECT_EQ(text.find("score ="), std::string::npos) << text;
      EXPECT_EQ(text.find("program") != std::string::npos, *c.rest != 0) << text;
      EXPECT_NE(text.find(c.rest), std::string::npos) << text;
    }
    const ProgramResults got = run_program(problem, given, {}, 3), expected = exact_program(problem, given, 3);
    EXPECT_LT(difference(got.out, expected.out), 1e-5) << c.text;
    EXPECT_LT(difference(got.lse, expected.lse), 1e-5) << c.text;
    EXPECT_LT(difference(got.dq, expected.dq), 2e-5) << c.text;
    EXPECT_LT(difference(got.dk, expected.dk), 2e-5) << c.text;
    EXPECT_LT(difference(got.dv, expected.dv), 2e-5) << c.text;
  }
}

// Where the option would be something else the program stays: the distance has another diagonal or sign, there are too few
// slopes, slopes have gradients, or another option comes between.
TEST(CpuPrograms, ScoresThatOnlyLookLikeOptionsStayPrograms) {
  const auto stays = [](const Problem& problem, Pass pass = Pass::forward) {
    return explain(problem, pass).find("score = z") != std::string::npos;
  };
  Problem alibi{.seq_q = 37, .seq_kv = 37, .heads_q = 4, .heads_kv = 4, .head_dim = 16};
  alibi.program = std::string(alibi_text) + "score = z";
  alibi.program_sizes[0][0] = 4;
  EXPECT_FALSE(stays(alibi));
  Problem other = alibi;
  other.seq_kv = 38;
  EXPECT_TRUE(stays(other));
  other = alibi, other.alibi = true;
  EXPECT_TRUE(stays(other));
  other = alibi, other.packed = true;
  EXPECT_TRUE(stays(other));
  other = alibi, other.seqused_kv = true;
  EXPECT_TRUE(stays(other));
  other = alibi, other.program_gradients = 1;
  EXPECT_FALSE(stays(other));
  EXPECT_TRUE(stays(other, Pass::backward));
  other = alibi, other.program.replace(other.program.find("abs d"), 5, "neg d");  // it may be negative
  other.program.replace(other.program.find("sub score"), 3, "add");
  EXPECT_TRUE(stays(other));
  other.causal = true;
  EXPECT_FALSE(stays(other));
  Problem cap = alibi;
  cap.program = "x = div score 0.75\ny = tanh x\nz = mul y 0.75\nscore = z";
  cap.program_sizes = {};
  EXPECT_FALSE(stays(cap));
  other = cap, other.softcap = 3;
  EXPECT_TRUE(stays(other));
  other = cap, other.alibi = true;
  EXPECT_TRUE(stays(other));
  other = cap, other.bias.present = true;
  EXPECT_TRUE(stays(other));
}

std::string refusal(const Problem& problem, const Buffers& buffers = {}) {
  try {
    forward(problem, buffers);
  } catch (const Error& error) {
    return error.what();
  }
  return "taken";
}

TEST(CpuPrograms, WhatDoesNotFitIsRefused) {
  Problem problem{.seq_q = 8, .seq_kv = 8, .head_dim = 8};
  problem.program = "t0 = tensor float32 1\nx = load t0 j\nv = add score x\nscore = v";
  EXPECT_NE(refusal(problem).find("line 2: index 0 of t0 runs from 0 to 7; allowed are 0 to -1"), std::string::npos)
      << refusal(problem);
  problem.program_sizes[0][0] = 7;
  EXPECT_NE(refusal(problem).find("allowed are -7 to 6"), std::string::npos);
  problem.program_sizes[0][0] = 8;
  std::vector<float> data(64);
  const void* null[] = {nullptr};
  Buffers buffers{.q = data.data(), .k = data.data(), .v = data.data(), .out = data.data()};
  EXPECT_NE(refusal(problem, buffers).find("program_tensors: got null"), std::string::npos) << refusal(problem, buffers);
  buffers.program_tensors = null;
  EXPECT_NE(refusal(problem, buffers).find("program tensor t0: got null"), std::string::npos);
  problem.program = std::string(alibi_text) + "score = z";
  EXPECT_NE(refusal(problem, buffers).find("program tensor t0: got null"), std::string::npos);
  buffers.program_tensors = nullptr;
  EXPECT_NE(refusal(problem, buffers).find("program_tensors: got null"), std::string::npos);
  problem.program_sizes[1][0] = 3;
  EXPECT_NE(refusal(problem, buffers).find("the program has no such tensor"), std::string::npos);
  problem.program_sizes[1][0] = 0;
  problem.program.clear();
  EXPECT_NE(refusal(problem, buffers).find("there is no program"), std::string::npos);
}

TEST(CpuPrograms, FromC) {
  flash_attention_problem problem;
  flash_attention_problem_init(&problem);
  problem.seq_q = problem.seq_kv = 2, problem.head_dim = 8;
  problem.program = "v = ge i j\nvisible = v";
  const std::vector<float> zeros(16), values{1, 1, 1, 1, 1, 1, 1, 1, 3, 3, 3, 3, 3, 3, 3, 3};
  std::vector<float> out(16);
  flash_attention_buffers buffers;
  flash_attention_buffers_init(&buffers);
  buffers.q = buffers.k = zeros.data(), buffers.v = values.data(), buffers.out = out.data();
  flash_attention_options options;
  flash_attention_options_init(&options);
  ASSERT_EQ(flash_attention_forward(&problem, &buffers, &options), FLASH_ATTENTION_OK) << flash_attention_last_error();
  EXPECT_FLOAT_EQ(out[0], 1);
  EXPECT_FLOAT_EQ(out[8], 2);
}

}  // namespace
}  // namespace flash_attention::testing
