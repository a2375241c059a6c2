#include "program/lower/options.h"

#include <gtest/gtest.h>

namespace flash_attention::program {
namespace {

struct OptionCase {
  const char* text;
  float softcap = 0;
  int slopes = -1;
  bool by_batch = false, absolute = true;
  std::int64_t offset = 0;
};

const char* const slopes_by_head = "t0 = tensor float32 1\nx = load t0 h\nd = sub i j\n";

std::string with_slopes(const char* rest) { return std::string(slopes_by_head) + rest; }

void expect(const std::string& text, const OptionCase& c) {
  const auto taken = take_options(text);
  ASSERT_EQ(taken.has_value(), c.softcap > 0 || c.slopes >= 0) << text;
  if (!taken) return;
  EXPECT_EQ(taken->softcap, c.softcap) << text;
  EXPECT_EQ(taken->slopes, c.slopes) << text;
  EXPECT_EQ(taken->rest, "") << text;
  if (c.slopes < 0) return;
  EXPECT_EQ(taken->by_batch, c.by_batch) << text;
  EXPECT_EQ(taken->absolute, c.absolute) << text;
  EXPECT_EQ(taken->offset, c.offset) << text;
}

TEST(ProgramOptions, ASoftCapIsTheOption) {
  const OptionCase cases[] = {
      {"x = div score 20.0\ny = tanh x\nz = mul y 20.0\nscore = z", 20},
      {"x = div score 20.0\ny = tanh x\nz = mul 20.0 y\nscore = z", 20},
      {"x = mul score 0.125\ny = tanh x\nz = mul 8.0 y\nscore = z", 8},
      {"x = mul 0.033333335 score\ny = tanh x\nz = mul 30.0 y\nscore = z", 30},
      {"x = mul 0.0333 score\ny = tanh x\nz = mul 30.0 y\nscore = z"},
      {"x = div score 20.0\ny = tanh x\nz = mul y 30.0\nscore = z"},
      {"x = div 20.0 score\ny = tanh x\nz = mul y 20.0\nscore = z"},
      {"x = div score 20.0\ny = tanh x\nz = add y 20.0\nscore = z"},
      {"x = div score -20.0\ny = tanh x\nz = mul y -20.0\nscore = z"},
      {"x = div score 1e-40\ny = tanh x\nz = mul y 1e-40\nscore = z"},
      {"x = div score inf\ny = tanh x\nz = mul y inf\nscore = z"},
      {"x = div score 20.0\nw = add x 1.0\ny = tanh w\nz = mul y 20.0\nscore = z"},
      {"s0 = scalar float\nx = div score s0\ny = tanh x\nz = mul y s0\nscore = z"},  // known when it is called
      {"x = div score 20.0\ny = tanh x\nw = neg y\nk = abs w\nz = mul y k\nscore = z"},
      {"s0 = scalar float\nx = mul score s0\ny = tanh x\nz = mul y 20.0\nscore = z"},
      {"x = mul score 0.1\ny = tanh x\nz = mul y 20.0\nscore = z"},
      {"k = float i\nx = mul k 0.05\ny = tanh x\nz = mul y 20.0\nscore = z"},
      {"x = neg score\nscore = x"},
      {"score = score"},
      {"v = ge i j\nvisible = v"},
  };
  for (const OptionCase& c : cases) expect(c.text, c);
}

TEST(ProgramOptions, ASlopeForEachHeadIsAlibi) {
  const OptionCase alibi{.text = "", .slopes = 0}, one_sided{.text = "", .slopes = 0, .absolute = false}, none{.text = ""};
  expect(with_slopes("a = abs d\nf = float a\ny = mul x f\nz = sub score y\nscore = z"), alibi);
  expect(with_slopes("f = float d\na = abs f\ny = mul a x\nz = sub score y\nscore = z"), alibi);
  expect(with_slopes("a = abs d\nf = float a\nn = neg x\ny = mul n f\nz = add y score\nscore = z"), alibi);
  expect(with_slopes("a = abs d\nn = neg a\nf = float n\ny = mul x f\nz = add score y\nscore = z"), alibi);
  expect(with_slopes("n = neg d\nf = float n\ny = mul x f\nz = add score y\nscore = z"), one_sided);
  expect(with_slopes("f = float d\ny = mul x f\nz = sub score y\nscore = z"), one_sided);
  expect(with_slopes("e = add d 7\na = abs e\nf = float a\ny = mul x f\nz = sub score y\nscore = z"),
         {.text = "", .slopes = 0, .offset = 7});
  expect(with_slopes("n = neg d\ne = sub n 7\na = abs e\nf = float a\ny = mul x f\nz = sub score y\nscore = z"),
         {.text = "", .slopes = 0, .offset = 7});
  expect(with_slopes(
             "u = div score 3.0\nt = tanh u\nc = mul t 3.0\na = abs d\nf = float a\ny = mul x f\nz = sub c y\nscore = z"),
         {.text = "", .softcap = 3, .slopes = 0});
  // It grows with the distance, is less the score, or is of another size.
  expect(with_slopes("a = abs d\nf = float a\ny = mul x f\nz = add score y\nscore = z"), none);
  expect(with_slopes("f = float d\ny = mul x f\nz = add score y\nscore = z"), none);
  expect(with_slopes("a = abs d\nf = float a\ny = mul x f\nz = sub y score\nscore = z"), none);
  expect(with_slopes("a = abs d\nf = float a\ny = mul x f\nw = mul y 0.5\nz = sub score w\nscore = z"), none);
  expect(with_slopes("a = abs d\nf = float a\ny = mul x f\nw = mul 0.5 y\nz = sub score w\nscore = z"), none);
  expect(with_slopes("a = abs d\nf = float a\ny = mul f f\nw = mul x y\nz = sub score w\nscore = z"), none);
  expect(with_slopes("a = abs d\nf = float a\ny = mul x x\nw = mul f y\nz = sub score w\nscore = z"), none);
  expect(with_slopes("e = add i j\na = abs e\nf = float a\ny = mul x f\nz = sub score y\nscore = z"), none);
  expect(with_slopes("z = sub score x\nscore = z"), none);
  expect(with_slopes("a = abs d\nf = float a\nz = sub score f\nscore = z"), none);
  expect(with_slopes("w = mul score 2.0\na = abs d\nf = float a\ny = mul x f\nz = sub w y\nscore = z"), none);
}

TEST(ProgramOptions, SlopesAreFloatsOfHeads) {
  const std::string rest = "d = sub i j\na = abs d\nf = float a\ny = mul x f\nz = sub score y\nscore = z";
  EXPECT_TRUE(take_options("t0 = tensor float32 2\nx = load t0 b h\n" + rest)->by_batch);
  const auto second = take_options("t0 = tensor int32 1\nt1 = tensor float32 1\nx = load t1 h\n" + rest);
  ASSERT_TRUE(second);
  EXPECT_EQ(second->slopes, 1);
  for (const char* const others : {"t0 = tensor float16 1\nx = load t0 h\n", "t0 = tensor float32 1\nx = load t0 i\n",
                                   "t0 = tensor float32 2\nx = load t0 h b\n", "t0 = tensor float32 2\nx = load t0 h h\n",
                                   "t0 = tensor float32 1\nk = add h 1\nx = load t0 k\n",
                                   "t0 = tensor float32 0\nx = load t0\n", "t0 = tensor float32 3\nx = load t0 b h h\n"})
    EXPECT_FALSE(take_options(others + rest)) << others;
}

// What is left is the mask.
TEST(ProgramOptions, TheMaskStays) {
  const auto taken =
      take_options("x = div score 20.0\ny = tanh x\nz = mul y 20.0\nm = mod j 3\nv = eq m 0\nscore = z\nvisible = v");
  ASSERT_TRUE(taken);
  EXPECT_EQ(taken->rest, "x = div score 20.0\ny = tanh x\nz = mul y 20.0\nm = mod j 3\nv = eq m 0\nvisible = v");
}

}  // namespace
}  // namespace flash_attention::program
