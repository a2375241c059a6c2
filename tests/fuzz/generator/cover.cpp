#include "fuzz/generator/cover.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <random>
#include <stdexcept>

#include "fuzz/generator/sight.h"

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
    const bool blank = is_blank(row);
    for (int a = 0; a < num_factors; ++a) {
      for (int b = 0; b < num_factors; ++b) {
        if (a == b || !has(a, row[a], b, row[b])) continue;
        if (blank && !is_blank(a, row[a]) && !is_blank(b, row[b])) continue;
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

/// What a row is for. A mistake shows in a row that sees something, so most rows have no blank level, at most one dull
/// level and few that hide keys. Blank and dull levels meet in some rows of their own.
enum class Kind { seen, dull, blank };
struct Aim {
  Kind kind;
  int max_hiding;
};

bool suits(const Aim& aim, const Row& row, int factor, int level) {
  if (aim.kind == Kind::blank) return is_blank(factor, level);
  if (is_blank(factor, level)) return false;
  if (aim.kind == Kind::dull) return is_dull(factor, level);
  if (is_dull(factor, level) && num_dull(row) > 0) return false;
  return !hides_keys(factor, level) || num_hiding(row) < aim.max_hiding;
}

/// How well it does: 2 where it suits, 0 for what a row of that kind has only if no other level is left.
int suitability(const Aim& aim, const Missing& missing, const Row& row, int factor, int level) {
  if (aim.kind == Kind::seen) return suits(aim, row, factor, level) ? 2 : 0;
  if (aim.kind == Kind::dull && is_blank(factor, level)) return 0;
  return suits(aim, row, factor, level) && missing.want(factor, level) > 0 ? 2 : 1;
}

/// Of every twenty rows one is dull and one is blank.
Kind kind_of(std::size_t row) { return row % 20 == 19 ? Kind::blank : row % 20 == 9 ? Kind::dull : Kind::seen; }

/// Chooses the open factors of [begin, end) in random order, each so that it suits the aim and adds the most pairs; ties by
/// lot. One stays open where three levels do not go together though each two of them do.
Row choose(const Domain& domain, const Levels& levels, const Missing& missing, const Aim& aim, Row row, int begin, int end,
           std::mt19937_64& random) {
  std::vector<int> order(end - begin);
  std::iota(order.begin(), order.end(), begin);
  std::shuffle(order.begin(), order.end(), random);
  for (const int factor : order) {
    if (row[factor] >= 0) continue;
    int best = -1;
    std::array<int, 3> most{-1, -1, -1};
    std::uint64_t ticket = 0;
    for (int level = 0; level < num_levels(factor); ++level) {
      if (!domain.has(factor, level) || !levels.fits(row, factor, level)) continue;
      const int want = missing.want(factor, level);
      const std::array<int, 3> gain{suitability(aim, missing, row, factor, level), missing.gain(row, factor, level), want};
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
/// that its rows can add. `free`: the row need not add a pair where none suits it.
Row best_row(const Domain& domain, const Levels& levels, const Missing& missing, const Aim& aim, const Row& given,
             int begin, int end, bool free, std::mt19937_64& random) {
  std::vector<std::array<int, 4>> pairs = open_pairs(levels, missing, given, begin, end);
  if (pairs.empty()) pairs = open_pairs(levels, missing, given, end, num_factors);
  const auto suited = [&](const std::array<int, 4>& pair) {
    const bool first = suits(aim, given, pair[0], pair[1]), second = suits(aim, given, pair[2], pair[3]);
    return aim.kind == Kind::seen ? first && second : first || second;
  };
  if (const auto others = std::stable_partition(pairs.begin(), pairs.end(), suited); free || others != pairs.begin())
    pairs.erase(others, pairs.end());
  Row best;
  int most = -1;
  constexpr int tries = 6, max_tries = 200;
  for (int attempt = 0, whole = 0; whole < (pairs.empty() ? 1 : tries) && attempt < max_tries; ++attempt) {
    Row row = given;
    if (!pairs.empty()) {
      const auto& [a, x, b, y] = pairs[random() % pairs.size()];
      row[a] = x, row[b] = y;
    }
    row = choose(domain, levels, missing, aim, row, begin, end, random);
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
    constexpr int max_hiding[] = {2, 2, 2, 2, 2, 4, 4, 4, 4, num_factors};
    Aim aim{Kind::seen, max_hiding[random() % std::size(max_hiding)]};
    Row start = best_row(domain, levels, missing, aim, Row(), 0, num_compiled, false, random);
    for (int n = 0; n < share; ++n) {
      aim.kind = kind_of(rows.size());
      const bool free = n > 0 && aim.kind == Kind::seen;
      rows.push_back(best_row(domain, levels, missing, aim, start, num_compiled, num_factors, free, random));
      missing.take(rows.back());
      for (int factor = num_compiled; factor < num_factors; ++factor) start[factor] = -1;
    }
  }
  return rows;
}

}  // namespace flash_attention::fuzz
