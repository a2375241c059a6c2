#include "program/lower/window.h"

#include <gtest/gtest.h>

#include "program/program.h"
#include "support/cases/programs.h"

namespace flash_attention::program {
namespace {

struct WindowCase {
  const char* text;
  std::int64_t left, right;  // -1: no bound; both: nothing is taken
};

const WindowCase window_cases[] = {
    {"v = ge i j\nvisible = v", -1, 0},
    {"v = le j i\nvisible = v", -1, 0},
    {"v = gt i j\nvisible = v", -1, -1},  // no window begins before the diagonal
    {"k = sub j 1\nv = gt i k\nvisible = v", -1, 0},
    {"d = sub i j\nv = ge d -3\nvisible = v", -1, 3},
    {"d = sub i j\nn = neg d\nv = lt n 4\nvisible = v", -1, 3},
    {"d = sub i j\np = ge d 0\nq = lt d 9\nv = and p q\nvisible = v", 8, 0},
    {"d = sub i j\np = ge d 0\nq = lt d 9\nr = le d 5\nx = and p q\nv = and x r\nvisible = v", 5, 0},
    {"d = sub i j\np = ge d 0\nq = lt d 5\nr = le d 8\nx = and p q\nv = and r x\nvisible = v", 4, 0},
    {"p = ge i j\nm = mod j 3\nq = ne m 0\nv = and p q\nvisible = v", -1, 0},
    {"p = ge i j\nm = mod j 3\nq = ne m 0\nn = mod i 2\nr = eq n 0\nx = and q p\nv = and x r\nvisible = v", -1, 0},
    {"d = sub i j\ne = abs d\nv = le e 5\nvisible = v", 5, 5},
    {"d = sub j i\nf = add d 2\ne = abs f\nv = gt 6 e\nvisible = v", 7, 3},
    {"d = sub i j\ne = abs d\nv = ge e 5\nvisible = v", -1, -1},
    {"d = sub i j\nf = add d 6\ne = abs f\nv = le e 5\nvisible = v", -1, -1},
    {"d = sub i j\ne = abs d\nk = add j 2\nv = le e k\nvisible = v", -1, -1},
    {"s = add i j\ne = abs s\nv = le e 9\nvisible = v", -1, -1},
    {"d = sub i j\ne = abs d\np = le e 8\nm = mod d 2\nq = eq m 0\nv = and p q\nvisible = v", 8, 8},
    {"p = ge i j\nm = lt j 4\nv = or p m\nvisible = v", -1, -1},
    {"p = ge i j\nv = not p\nvisible = v", -1, -1},
    {"s = add i j\nv = le s 20\nvisible = v", -1, -1},
    {"t = add i i\nv = ge t j\nvisible = v", -1, -1},
    {"t = add j j\nv = ge i t\nvisible = v", -1, -1},
    {"d = sub i j\nf = float d\ne = abs f\nv = le e 5.0\nvisible = v", -1, -1},  // a distance in floats stays a program
    {"v = ge i 4\nvisible = v", -1, -1},
    {"x = neg score\nv = ge i j\nscore = x\nvisible = v", -1, 0},
    {"v = ge i j\nw = and v v\nu = and w w\nvisible = u", -1, 0},
    {"v = ge i j\nw = and v true\nvisible = w", -1, -1},
    {"k = add i 2147483647\nv = ge k j\nvisible = v", -1, -1},  // goes round
    {"k = sub i 2147483647\nv = le k j\nvisible = v", -1, -1},
};

// The window and what is left of the text show what the text showed.
TEST(ProgramWindow, TermsOfTheDiagonalBecomeAWindow) {
  for (const WindowCase& c : window_cases) {
    const auto taken = take_window(c.text);
    ASSERT_EQ(taken.has_value(), c.left >= 0 || c.right >= 0) << c.text;
    if (!taken) continue;
    EXPECT_EQ(taken->left, c.left) << c.text;
    EXPECT_EQ(taken->right, c.right) << c.text;
    const testing::RandomProgram before{std::string(c.text)};
    EXPECT_EQ(taken->rest.empty(), before.parsed.score < 0 && std::string(c.text).find("mod") == std::string::npos);
    for (int i = 0; i < 24; ++i) {
      for (int j = 0; j < 24; ++j) {
        bool seen = (c.left < 0 || j >= i - c.left) && (c.right < 0 || j <= i + c.right);
        if (!taken->rest.empty()) seen = seen && testing::RandomProgram(taken->rest).visible(0, 0, i, j);
        EXPECT_EQ(seen, before.visible(0, 0, i, j)) << c.text << " at " << i << ", " << j;
      }
    }
  }
}

// A tensor that only the mask reads may be given a gradient, which is 0: the program that knows it stays.
TEST(ProgramWindow, WhatIsCapturedStays) {
  EXPECT_FALSE(take_window("t0 = tensor float32 1\nx = load t0 j\nv = ge i j\nvisible = v").has_value());
  EXPECT_TRUE(take_window("t0 = tensor float32 1\nx = load t0 j\ny = add x score\nv = ge i j\nscore = y\nvisible = v"));
  const auto taken = take_window("t0 = tensor bool 0\nx = load t0\nv = ge i j\nw = and v x\nvisible = w");
  ASSERT_TRUE(taken.has_value());
  EXPECT_EQ(taken->right, 0);
  EXPECT_EQ(taken->rest, "t0 = tensor bool 0\nx = load t0\nv = ge i j\nw = and v x\nvisible = x");
  EXPECT_FALSE(take_window("s0 = scalar int\nx = add s0 j\nv = ge i j\nvisible = v").has_value());
}

TEST(ProgramWindow, AScoreAloneHasNone) { EXPECT_FALSE(take_window("x = neg score\nscore = x").has_value()); }

// What is left would need more values than a program may have: it stays as it is.
TEST(ProgramWindow, AProgramOfAsManyValuesAsAreAllowedStays) {
  const auto text_of = [](int num_values) {
    std::string text = "v = ge i j\nm = mod j 3\nn0 = eq m 0\n";
    for (int n = 0; n < num_values; ++n) text += "n" + std::to_string(n + 1) + " = not n" + std::to_string(n) + "\n";
    const std::string last = "n" + std::to_string(num_values);
    return text + "w = and v " + last + "\nvisible = w";
  };
  const auto size_of = [&](int num_values) { return parsed(text_of(num_values))->nodes.size(); };
  const int most = max_values - static_cast<int>(size_of(0));
  ASSERT_EQ(size_of(most), static_cast<std::size_t>(max_values));
  EXPECT_FALSE(take_window(text_of(most)).has_value());
  EXPECT_TRUE(take_window(text_of(most - 1)).has_value());
}

// A conjunction of a conjunction, many times over, is not visited once for each path.
TEST(ProgramWindow, SharedTermsAreLookedAtOnce) {
  std::string text = "v0 = ge i j\nd0 = sub i j\n";
  for (int n = 0; n < 60; ++n) {
    const std::string at = std::to_string(n), next = std::to_string(n + 1);
    text += "v" + next + " = and v" + at + " v" + at + "\nd" + next + " = neg d" + at + "\n";
  }
  const auto taken = take_window(text + "p = ge d60 0\nv = and v60 p\nvisible = v");
  ASSERT_TRUE(taken.has_value());
  EXPECT_EQ(taken->right, 0);
}

}  // namespace
}  // namespace flash_attention::program
