#include "fuzz/generator/cover.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <random>
#include <stdexcept>

namespace flash_attention::fuzz {
namespace {

int num_levels(int factor) { return static_cast<int>(levels_of(static_cast<Factor>(factor)).size()); }

/// All levels of all factors in one line: pairs of them are cells of a square.
class Levels {
 public:
  explicit Levels(const Domain& domain) {
    for (int f = 0; f < num_factors; ++f) {
      first_.push_back(count_);
      count_ += num_levels(f);
    }
    together_.assign(static_cast<std::size_t>(count_) * count_, 0);
    possible_.assign(count_, 1);
    for (int a = 0; a < num_factors; ++a) {
      for (int b = 0; b < num_factors; ++b) {
        for (int x = 0; a != b && x < num_levels(a); ++x) {
          for (int y = 0; y < num_levels(b); ++y) {
            together_[at(a, x, b, y)] =
                domain.has(a, x) && domain.has(b, y) && go_together(static_cast<Factor>(a), x, static_cast<Factor>(b), y);
          }
        }
      }
    }
    while (drop_one()) {
    }
  }

  std::size_t at(int a, int x, int b, int y) const {
    return static_cast<std::size_t>(first_[a] + x) * count_ + first_[b] + y;
  }
  int index(int factor, int level) const { return first_[factor] + level; }
  int count() const { return count_; }
  const std::vector<char>& together() const { return together_; }

  /// Whether the level goes with all that the row has already.
  bool fits(const Row& row, int factor, int level) const {
    if (!possible_[index(factor, level)]) return false;
    for (int other = 0; other < num_factors; ++other)
      if (other != factor && row[other] >= 0 && !together_[at(factor, level, other, row[other])]) return false;
    return true;
  }

 private:
  /// Where the domain has nothing of some factor that goes with a level, no row can have that level: the shape of a bias
  /// where there is none. Whether there was such a level.
  bool drop_one() {
    for (int a = 0; a < num_factors; ++a) {
      for (int x = 0; x < num_levels(a); ++x) {
        if (!possible_[index(a, x)] || goes_with_some(a, x)) continue;
        possible_[index(a, x)] = 0;
        for (int other = 0; other < count_; ++other)
          together_[index(a, x) * count_ + other] = together_[other * count_ + index(a, x)] = 0;
        return true;
      }
    }
    return false;
  }
  bool goes_with_some(int a, int x) const {
    for (int b = 0; b < num_factors; ++b) {
      bool some = a == b;
      for (int y = 0; y < num_levels(b) && !some; ++y) some = together_[at(a, x, b, y)] != 0;
      if (!some) return false;
    }
    return true;
  }

  std::vector<int> first_;
  int count_ = 0;
  std::vector<char> together_;
  std::vector<char> possible_;
};

/// The pairs that no row has yet.
class Missing {
 public:
  explicit Missing(const Levels& levels) : levels_(levels), missing_(levels.together()), wanted_(levels.count()) {
    for (std::size_t cell = 0; cell < missing_.size(); ++cell) wanted_[cell / levels.count()] += missing_[cell];
  }

  bool any() const {
    return std::any_of(wanted_.begin(), wanted_.end(), [](int pairs) { return pairs > 0; });
  }
  bool has(int a, int x, int b, int y) const { return missing_[levels_.at(a, x, b, y)] != 0; }

  /// How many pairs the level would add to the factors that are chosen already.
  int gain(const Row& row, int factor, int level) const {
    int pairs = 0;
    for (int other = 0; other < num_factors; ++other)
      if (other != factor && row[other] >= 0) pairs += has(factor, level, other, row[other]);
    return pairs;
  }

  /// How many of a level's pairs are missing at all.
  int want(int factor, int level) const { return wanted_[levels_.index(factor, level)]; }

  void take(const Row& row) {
    for (int a = 0; a < num_factors; ++a) {
      for (int b = 0; b < num_factors; ++b) {
        if (a == b || !has(a, row[a], b, row[b])) continue;
        missing_[levels_.at(a, row[a], b, row[b])] = 0;
        --wanted_[levels_.index(a, row[a])];
      }
    }
  }

 private:
  const Levels& levels_;
  std::vector<char> missing_;
  std::vector<int> wanted_;
};

/// Chooses the open factors of [begin, end) in random order, each so that it adds the most pairs; ties by lot. One stays
/// open where three levels do not go together though each two of them do.
Row choose(const Domain& domain, const Levels& levels, const Missing& missing, Row row, int begin, int end,
           std::mt19937_64& random) {
  std::vector<int> order(end - begin);
  std::iota(order.begin(), order.end(), begin);
  std::shuffle(order.begin(), order.end(), random);
  for (const int factor : order) {
    if (row[factor] >= 0) continue;
    int best = -1;
    std::pair<int, int> most{-1, -1};
    std::uint64_t ticket = 0;
    for (int level = 0; level < num_levels(factor); ++level) {
      if (!domain.has(factor, level) || !levels.fits(row, factor, level)) continue;
      const std::pair<int, int> gain{missing.gain(row, factor, level), missing.want(factor, level)};
      const std::uint64_t drawn = random();
      if (gain > most || (gain == most && drawn > ticket)) best = level, most = gain, ticket = drawn;
    }
    row[factor] = best;
  }
  return row;
}

/// The missing pairs that the row can take, of which the second factor lies in [begin, end).
std::vector<std::array<int, 4>> open_pairs(const Levels& levels, const Missing& missing, const Row& row, int begin,
                                           int end) {
  const auto open = [&](int factor, int level) {
    return row[factor] >= 0 ? row[factor] == level : levels.fits(row, factor, level);
  };
  std::vector<std::array<int, 4>> pairs;
  for (int b = begin; b < end; ++b) {
    for (int y = 0; y < num_levels(b); ++y) {
      if (missing.want(b, y) == 0 || !open(b, y)) continue;
      for (int a = 0; a < b; ++a) {
        for (int x = 0; x < num_levels(a); ++x)
          if (missing.has(a, x, b, y) && open(a, x)) pairs.push_back({a, x, b, y});
      }
    }
  }
  return pairs;
}

/// The best of a few tries, by the pairs that it adds. A configuration without a pair of its own is chosen for one of those
/// that its rows can add.
Row best_row(const Domain& domain, const Levels& levels, const Missing& missing, const Row& given, int begin, int end,
             std::mt19937_64& random) {
  std::vector<std::array<int, 4>> pairs = open_pairs(levels, missing, given, begin, end);
  if (pairs.empty()) pairs = open_pairs(levels, missing, given, end, num_factors);
  Row best;
  int most = -1;
  constexpr int tries = 6, most_tries = 200;
  for (int attempt = 0, whole = 0; whole < (pairs.empty() ? 1 : tries) && attempt < most_tries; ++attempt) {
    Row row = given;
    if (!pairs.empty()) {
      const auto& [a, x, b, y] = pairs[random() % pairs.size()];
      row[a] = x, row[b] = y;
    }
    row = choose(domain, levels, missing, row, begin, end, random);
    bool open = false;
    for (int factor = begin; factor < end; ++factor) open = open || row[factor] < 0;
    if (open) continue;
    ++whole;
    int gain = 0;
    for (int factor = 0; factor < num_factors; ++factor)
      if (row[factor] >= 0) gain += missing.gain(row, factor, row[factor]);
    if (gain > most) best = row, most = gain;
  }
  if (most < 0) throw std::logic_error("no row has levels that go_together() allows");
  return best;
}

}  // namespace

std::vector<Row> cover(const Domain& domain, int share, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const Levels levels(domain);
  Missing missing(levels);
  std::vector<Row> rows;
  while (missing.any()) {
    Row start = best_row(domain, levels, missing, Row(), 0, num_compiled, random);
    for (int n = 0; n < share; ++n) {
      rows.push_back(best_row(domain, levels, missing, start, num_compiled, num_factors, random));
      missing.take(rows.back());
      for (int factor = num_compiled; factor < num_factors; ++factor) start[factor] = -1;
    }
  }
  return rows;
}

}  // namespace flash_attention::fuzz
