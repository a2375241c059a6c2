#include "program/stages.h"

#include <gtest/gtest.h>

#include <cmath>

#include "program/source.h"

namespace flash_attention::program {
namespace {

int count(const std::string& text, const std::string& what) {
  int found = 0;
  for (std::size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++found;
  return found;
}

TEST(ProgramStages, AreThatOfTheirArguments) {
  const Program program = parse(
      "t0 = tensor float32 1\nx = load t0 h\ny = load t0 i\nz = load t0 j\nu = add x y\nw = add u z\nk = add w score\n"
      "score = k");
  const std::vector<Stage> stages = stages_of(program.nodes);
  std::vector<Stage> of_lines;
  for (std::size_t n = 0; n < program.nodes.size(); ++n) {
    if (num_args(program.nodes[n].op) > 0) of_lines.push_back(stages[n]);
  }
  const std::vector<Stage> expected{Stage::head, Stage::row, Stage::key, Stage::row, Stage::pair, Stage::pair};
  EXPECT_EQ(of_lines, expected);
}

// What a head, a row or a key has is read once, not for each score.
TEST(ProgramStages, SourceReadsOnceForEachStage) {
  const Program program = parse(
      "t0 = tensor float32 1\nt1 = tensor int32 1\nd = sub i j\na = abs d\nf = float a\nx = load t0 h\ny = mul x f\n"
      "z = sub score y\np = load t1 i\nq = load t1 j\ns = eq p q\nscore = z\nvisible = s");
  const std::string source = cuda_source(program, {.longest = 1 << 22});
  const std::string pairs = source.substr(source.find("float score(float score"));
  EXPECT_EQ(count(pairs.substr(0, pairs.find("struct SeenKeys")), "element_"), 0) << source;
  const std::string tiles = pairs.substr(pairs.find("struct SeenKeys"));  // of keys: once for many tiles of rows
  EXPECT_EQ(count(tiles.substr(0, tiles.find("Bools seen(")), "element_"), 1) << source;
  EXPECT_EQ(count(tiles.substr(tiles.find("Bools seen(")), "element_"), 1) << source;
  EXPECT_EQ(count(source.substr(0, source.find("float score(float score")), "element_"), 3) << source;
  EXPECT_EQ(count(pairs, "to_float"), 0) << source;  // distances are differences of floats
  EXPECT_GT(count(cuda_source(program, {}), "to_float"), 0);
}

// Ints that a float cannot hold, or that go round, stay ints.
TEST(ProgramStages, OnlySmallCountsBecomeFloats) {
  for (const char* text : {"d = sub i j\nk = mul d 3\nf = float k\ns = add score f\nscore = s",
                           "d = sub i j\nk = add d 16777216\nf = float k\ns = add score f\nscore = s",
                           "d = add i j\nk = mod d 7\nf = float k\ns = add score f\nscore = s"}) {
    EXPECT_GT(count(cuda_source(parse(text), {.longest = 1 << 22}), "to_float"), 0) << text;
  }
}

TEST(ProgramStages, ATensorWithoutElementsIsZero) {
  const Program program = parse("t0 = tensor float32 1\nx = load t0 j\nz = add score x\nscore = z");
  EXPECT_GT(count(cuda_source(program, {}), "element_float32"), 0);
  EXPECT_EQ(count(cuda_source(program, {.gradients = 1, .empty = 1}), "element_float32"), 0);
}

TEST(ProgramStages, Magnitudes) {
  const auto largest = [](const char* text) {
    const Program program = parse(text);
    return largest_magnitude(program.nodes, program.score);
  };
  const float cap = largest("x = div score 20.0\ny = tanh x\nz = mul y 20.0\nscore = z");
  EXPECT_GE(cap, 20.0f);
  EXPECT_LT(cap, 21.0f);
  EXPECT_TRUE(std::isinf(largest("x = add score 1.0\nscore = x")));
  EXPECT_TRUE(std::isinf(largest("x = tanh score\ny = mul x 3e38\nscore = y")));
  EXPECT_TRUE(std::isinf(largest("x = tanh score\ny = div 1.0 x\nscore = y")));
  EXPECT_TRUE(std::isinf(largest("p = lt i j\nx = tanh score\ny = where p x -inf\nscore = y")));
  EXPECT_TRUE(std::isinf(largest("x = mul score 0.0\nscore = x")));
}

}  // namespace
}  // namespace flash_attention::program
