#include "tuning/contest.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace flash_attention::tuning {
namespace {

/// Contestants of known speed, with noise that has a seed, a drift that all share, and rare outliers.
class Racers {
 public:
  Racers(std::vector<double> seconds, double noise, std::uint64_t seed)
      : seconds_(std::move(seconds)), noise_(noise), state_(seed) {}

  double operator()(int i) {
    ++samples;
    const double drift = 1 + 0.2 * std::sin(0.01 * samples);  // the clock of the device
    const double outlier = uniform() < 0.03 ? 1.7 : 1;
    return seconds_[static_cast<std::size_t>(i)] * drift * outlier * (1 + noise_ * (2 * uniform() - 1));
  }

  int samples = 0;

 private:
  double uniform() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<double>(state_ >> 40) * 0x1p-24;
  }

  std::vector<double> seconds_;
  double noise_;
  std::uint64_t state_;
};

Outcome race(Racers& racers, int count, ContestLimits limits = {}) {
  return hold_contest(count, [&](int i) { return racers(i); }, limits);
}

constexpr double ms = 1e-3;

TEST(Contest, the_faster_one_wins_by_its_gain) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    Racers racers({1.00 * ms, 1.20 * ms, 0.80 * ms, 0.95 * ms, 3.00 * ms}, 0.02, seed);
    const Outcome outcome = race(racers, 5);
    ASSERT_TRUE(outcome.finished);
    EXPECT_EQ(outcome.winner, 2) << seed;
    EXPECT_NEAR(outcome.gain, 1.25, 0.03) << seed;
    EXPECT_LT(outcome.noise, 0.05) << seed;
    EXPECT_GE(outcome.noise, 0.01) << seed;
  }
}

/// Of 20 that are alike one is always the luckiest; it must not replace the first.
TEST(Contest, the_luckiest_of_many_does_not_win) {
  int changed = 0;
  for (std::uint64_t seed = 1; seed <= 100; ++seed) {
    Racers racers(std::vector<double>(20, 1 * ms), 0.1, seed);
    changed += race(racers, 20).winner != 0;
  }
  EXPECT_EQ(changed, 0);
}

TEST(Contest, a_gain_below_the_least_noise_changes_nothing) {
  Racers racers({1.000 * ms, 0.994 * ms}, 0.0001, 3);
  EXPECT_EQ(race(racers, 2).winner, 0);
}

TEST(Contest, a_gain_below_the_noise_changes_nothing) {
  int changed = 0;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    Racers racers({1.00 * ms, 0.98 * ms}, 0.6, seed);
    changed += race(racers, 2).winner != 0;
  }
  EXPECT_LE(changed, 1);
}

/// What was dropped takes forever.
TEST(Contest, one_that_never_ends_is_no_finalist) {
  const double forever = std::numeric_limits<double>::infinity();
  Racers racers({1 * ms, 0.8 * ms}, 0.01, 5);
  const Outcome outcome = hold_contest(
      3, [&](int i) { return i == 1 ? forever : racers(i == 2 ? 1 : 0); }, {});
  EXPECT_EQ(outcome.winner, 2);
}

TEST(Contest, ends_when_it_is_stopped_and_knows_nothing_then) {
  for (const int after : {0, 1, 7, 40}) {
    Racers racers({1 * ms, 0.5 * ms, 0.6 * ms}, 0.01, 7);
    const Outcome outcome = race(racers, 3, {.stops = [&] { return racers.samples >= after; }});
    EXPECT_FALSE(outcome.finished) << after;
    EXPECT_EQ(outcome.winner, 0) << after;
    EXPECT_LE(racers.samples, after) << after;
  }
}

TEST(Contest, alone_is_decided_at_once) {
  Racers racers({1 * ms}, 0.01, 9);
  const Outcome outcome = race(racers, 1);
  EXPECT_TRUE(outcome.finished);
  EXPECT_EQ(outcome.winner, 0);
}

TEST(Contest, takes_the_time_it_was_given) {
  Racers racers({1 * ms, 0.9 * ms}, 0.01, 11);
  const Outcome outcome = race(racers, 2, {.seconds = 0.03, .max_rounds = 1000});
  EXPECT_TRUE(outcome.finished);
  EXPECT_LT(racers.samples, 60);
}

}  // namespace
}  // namespace flash_attention::tuning
