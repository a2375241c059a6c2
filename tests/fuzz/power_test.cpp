// The generator's second promise: problems see something. Most of them tell a result with a mistake in it from the right
// one; that a covering array has every pair of options is worth nothing where no query sees a key.
#include <gtest/gtest.h>

#include <map>

#include "fuzz/generator/problems.h"
#include "fuzz/mutants.h"

namespace flash_attention::fuzz {
namespace {

constexpr Sizes small_power{.longest = 140, .max_products = 5e5};

/// Of a hundred problems that could tell the mistake, how many do.
std::map<Mistake, int> power_of(const char* kernel, Pass pass, int count) {
  constexpr Mistake all[] = {Mistake::none,    Mistake::half_scale, Mistake::edge, Mistake::head,
                             Mistake::dropout, Mistake::lse,        Mistake::dq};
  constexpr int share = 4;
  std::map<Mistake, int> asked, found;
  for (const GeneratedProblem& g : problems(kernel, share, 5, small_power)) {
    if (g.number / share % 2 != 0) continue;  // of more configurations
    if (count-- == 0) break;
    const Problem& p = g.c.problem;
    const testing::Expected expected = testing::expect(g.c, pass == Pass::backward);
    for (const Mistake mistake : all) {
      if (mistake == Mistake::dropout && p.dropout_p == 0) continue;
      if (mistake == Mistake::head && (p.heads_kv == 1 || p.kv_dtype)) continue;
      if (mistake == (pass == Pass::backward ? Mistake::lse : Mistake::dq)) continue;  // not its result
      ++asked[mistake];
      found[mistake] += finds(g.c, pass, mistake, expected);
    }
  }
  for (auto& [mistake, number] : found) number = number * 100 / asked[mistake];
  return found;
}

void expect_power(const char* kernel, Pass pass, int count, const std::map<Mistake, int>& least) {
  const std::map<Mistake, int> power = power_of(kernel, pass, count);
  EXPECT_EQ(power.at(Mistake::none), 0);
  for (const auto& [mistake, percent] : least)
    EXPECT_GE(power.at(mistake), percent) << kernel << ": " << mistake_names[static_cast<int>(mistake)];
}

/// The bounds are a little below what was measured; before problems were drawn to see something it was 15 to 50.
TEST(Power, ProblemsFindMistakesOfForward) {
  expect_power(
      "forward/sm90", Pass::forward, 60,
      {{Mistake::half_scale, 85}, {Mistake::edge, 60}, {Mistake::head, 80}, {Mistake::dropout, 80}, {Mistake::lse, 90}});
}

TEST(Power, ProblemsFindMistakesOfBackward) {
  expect_power(
      "backward/sm80", Pass::backward, 28,
      {{Mistake::half_scale, 80}, {Mistake::edge, 50}, {Mistake::head, 70}, {Mistake::dropout, 80}, {Mistake::dq, 80}});
}

}  // namespace
}  // namespace flash_attention::fuzz
