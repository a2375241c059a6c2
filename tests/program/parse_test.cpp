#include <gtest/gtest.h>

#include <string>

#include "flash_attention/error.h"
#include "program/program.h"

namespace flash_attention::testing {
namespace {

std::string refusal(const std::string& text) {
  try {
    program::parse(text);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    return error.what();
  }
  return "taken";
}

TEST(ProgramText, EachLineIsAValue) {
  const program::Program parsed = program::parse(
      "t0 = tensor float16 2\ns0 = scalar int\n\nd = sub i j\nf = float d\nx = load t0 h 3\ny = mul f x\nw = le d s0\n"
      "score = y\nvisible = w\n");
  ASSERT_EQ(parsed.tensors.size(), 1u);
  EXPECT_EQ(parsed.tensors[0].rank, 2);
  EXPECT_EQ(parsed.scalars.size(), 1u);
  EXPECT_EQ(parsed.nodes[static_cast<std::size_t>(parsed.score)].op, program::Op::mul);
  EXPECT_EQ(parsed.nodes[static_cast<std::size_t>(parsed.score)].line, 7);
  EXPECT_EQ(parsed.nodes[static_cast<std::size_t>(parsed.visible)].type, program::Type::boolean);
}

TEST(ProgramText, WhatIsNoProgramIsRefusedByLine) {
  EXPECT_NE(refusal("").find("line 1: the text ends without a result"), std::string::npos);
  EXPECT_NE(refusal("v = add i j\n").find("without a result"), std::string::npos);
  EXPECT_NE(refusal("v = add i j\nscore = v\n").find("line 2: the result 'score' is of type int"), std::string::npos);
  EXPECT_NE(refusal("v = gt score 0.5\nvisible = v").find("depends on the score"), std::string::npos);
  EXPECT_NE(refusal("v = add i 0.5\nscore = v").find("'add' of (int, float); allowed are ints or floats"),
            std::string::npos);
  EXPECT_NE(refusal("v = system i\nscore = v").find("no operation 'system'; allowed are load, add"), std::string::npos);
  EXPECT_NE(refusal("v = add i\nscore = v").find("takes 2 arguments, not 1"), std::string::npos);
  EXPECT_NE(refusal("v = add i k\nscore = v").find("'k' is no value"), std::string::npos);
  EXPECT_NE(refusal("v = add i j\nv = add i i\nscore = v").find("has a value already"), std::string::npos);
  EXPECT_NE(refusal("t1 = tensor float32 1").find("expected 't0 = tensor dtype rank'"), std::string::npos);
  EXPECT_NE(refusal("t0 = tensor float64 1").find("allowed are float32, float16"), std::string::npos);
  EXPECT_NE(refusal("t0 = tensor float32 5").find("allowed are 0 to 4"), std::string::npos);
  EXPECT_NE(refusal("t0 = tensor float32 1\nv = load t0 i j").find("has 1 axes and is read with 2"), std::string::npos);
  EXPECT_NE(refusal("t0 = tensor float32 1\nv = load t0 score").find("an index must be an int"), std::string::npos);
  EXPECT_NE(refusal("v = load t0 i").find("declares"), std::string::npos);
  EXPECT_NE(refusal("s0 = scalar bool").find("allowed are int and float"), std::string::npos);
  EXPECT_NE(refusal("score score").find("expected 'name = operation arguments'"), std::string::npos);
  EXPECT_NE(refusal("v = neg score\nscore = v\nscore = v").find("a second result"), std::string::npos);
  std::string long_text;
  for (int n = 0; n < 1100; ++n) long_text += "v" + std::to_string(n) + " = neg score\n";
  EXPECT_NE(refusal(long_text).find("more than 1024 values"), std::string::npos);
}

}  // namespace
}  // namespace flash_attention::testing
