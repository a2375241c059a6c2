// The published dropout function: its test vectors (docs/numerics.md) and whether its decisions are as good as independent.
#include <cmath>
#include <cstdint>

#include "flash_attention/attention.h"
#include "gtest/gtest.h"

namespace flash_attention::testing {
namespace {

/// Keys 64 to 95 of a row as bits, kept = 1.
std::uint32_t kept_of_row(float dropout_p, std::int64_t i) {
  std::uint32_t bits = 0;
  for (int bit = 0; bit < 32; ++bit) {
    const bool keeps = dropout_keeps(0x0123456789ABCDEFu, 0x0F1E2D3C4B5A6978u, dropout_p, 1, 2, 3, i, 64 + bit);
    bits |= std::uint32_t{keeps} << bit;
  }
  return bits;
}

TEST(DropoutFunction, PublishedVectors) {
  EXPECT_EQ(kept_of_row(0.5f, 0), 0x5D967532u);
  EXPECT_EQ(kept_of_row(0.5f, 8), 0x21513E03u);
  EXPECT_EQ(kept_of_row(0.5f, 21), 0x3D50980Bu);
  EXPECT_EQ(kept_of_row(0.5f, 4095), 0x5422EF06u);
  EXPECT_EQ(kept_of_row(0.1f, 0), 0xFD97FD76u);
  EXPECT_EQ(kept_of_row(0.1f, 8), 0x7FF7FFFBu);
  EXPECT_EQ(kept_of_row(0.1f, 21), 0xBFFFFEFFu);
  EXPECT_EQ(kept_of_row(0.1f, 4095), 0x7EBAFF7Fu);
}

/// Decisions of size x size scores, 1 where dropped.
class Mask {
 public:
  static constexpr std::int64_t size = 512;

  Mask(std::uint64_t seed, std::uint64_t offset, float p, std::int64_t head) : dropped_(size * size) {
    for (std::int64_t i = 0; i < size; ++i) {
      for (std::int64_t j = 0; j < size; ++j) dropped_[i * size + j] = !dropout_keeps(seed, offset, p, 0, head, 2, i, j);
    }
  }
  bool at(std::int64_t i, std::int64_t j) const { return dropped_[i * size + j]; }

 private:
  std::vector<char> dropped_;
};

/// A rate of count out of trials is within five deviations of p.
void expect_rate(std::int64_t count, std::int64_t trials, double p, const std::string& what) {
  const auto n = static_cast<double>(trials);
  EXPECT_LE(std::abs(static_cast<double>(count) - n * p), 5 * std::sqrt(n * p * (1 - p))) << what;
}

class DropoutStatistics : public ::testing::TestWithParam<float> {
 protected:
  const float p_ = GetParam();
  const Mask mask_{7, 0, p_, 0};
};

TEST_P(DropoutStatistics, Rate) {
  // Of all scores, and of each place in a block of 16 x 16, which is where words and halves are told apart.
  std::int64_t all = 0;
  std::vector<std::int64_t> places(256);
  for (std::int64_t i = 0; i < Mask::size; ++i) {
    for (std::int64_t j = 0; j < Mask::size; ++j) {
      all += mask_.at(i, j);
      places[i % 16 * 16 + j % 16] += mask_.at(i, j);
    }
  }
  expect_rate(all, Mask::size * Mask::size, p_, "all");
  for (int place = 0; place < 256; ++place) {
    expect_rate(places[place], Mask::size * Mask::size / 256, p_, "place " + std::to_string(place));
  }
}

TEST_P(DropoutStatistics, PairsAreDroppedTogetherAsOftenAsChanceHasIt) {
  struct Step {
    std::int64_t i, j;
  };
  // To neighbours, to the other words of a block, to the next blocks. (0, 1) from an even key is the same word exchanged.
  for (const Step& step : {Step{0, 1}, Step{1, 0}, Step{1, 1}, Step{0, 2}, Step{0, 8}, Step{8, 0}, Step{8, 8}, Step{0, 9},
                           Step{8, 1}, Step{8, 9}, Step{0, 16}, Step{16, 0}, Step{16, 16}}) {
    std::int64_t both[2] = {}, pairs[2] = {};
    for (std::int64_t i = 0; i + step.i < Mask::size; ++i) {
      for (std::int64_t j = 0; j + step.j < Mask::size; ++j) {
        both[j % 2] += mask_.at(i, j) && mask_.at(i + step.i, j + step.j);
        ++pairs[j % 2];
      }
    }
    for (int odd = 0; odd < 2; ++odd) {
      expect_rate(both[odd], pairs[odd], double{p_} * p_,
                  "step " + std::to_string(step.i) + ", " + std::to_string(step.j) + (odd ? " from odd" : " from even"));
    }
  }
}

TEST_P(DropoutStatistics, HeadsSeedsAndOffsetsDiffer) {
  for (const Mask& other : {Mask(7, 0, p_, 1), Mask(8, 0, p_, 0), Mask(7 + (1ull << 32), 0, p_, 0), Mask(7, 1, p_, 0),
                            Mask(7, 1ull << 32, p_, 0)}) {
    std::int64_t both = 0;
    for (std::int64_t i = 0; i < Mask::size; ++i) {
      for (std::int64_t j = 0; j < Mask::size; ++j) both += mask_.at(i, j) && other.at(i, j);
    }
    expect_rate(both, Mask::size * Mask::size, double{p_} * p_, "another mask");
  }
}

TEST_P(DropoutStatistics, TheEightScoresOfABlock) {
  // How many of them are dropped is distributed binomially: chi squared, 8 degrees of freedom, 1 in 10^6 above 42.7.
  std::int64_t seen[9] = {};
  for (std::int64_t i = 0; i < Mask::size; ++i) {
    for (std::int64_t j = 0; j < Mask::size; j += 2) {
      if (i % 16 >= 8 || j % 16 >= 8) continue;
      int dropped = 0;
      for (int e = 0; e < 8; ++e) dropped += mask_.at(i + e / 4 * 8, j + e / 2 % 2 * 8 + e % 2);
      ++seen[dropped];
    }
  }
  double chi_squared = 0, choices = 1;
  for (int dropped = 0; dropped <= 8; choices = choices * (8 - dropped) / (dropped + 1), ++dropped) {
    const double expected = static_cast<double>(Mask::size * Mask::size / 8) * choices * std::pow(double{p_}, dropped) *
                            std::pow(1 - double{p_}, 8 - dropped);
    const double difference = static_cast<double>(seen[dropped]) - expected;
    if (expected >= 5) chi_squared += difference * difference / expected;
  }
  EXPECT_LE(chi_squared, 42.7);
}

INSTANTIATE_TEST_SUITE_P(P, DropoutStatistics, ::testing::Values(0.5f, 0.1f, 0.37f));

}  // namespace
}  // namespace flash_attention::testing
