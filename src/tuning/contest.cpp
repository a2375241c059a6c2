#include "tuning/contest.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>

namespace flash_attention::tuning {
namespace {

double quantile(std::vector<double> values, double part) {
  std::ranges::sort(values);
  const double place = part * static_cast<double>(values.size() - 1);
  const auto low = static_cast<std::size_t>(place);
  const std::size_t high = std::min(low + 1, values.size() - 1);
  return values[low] + (values[high] - values[low]) * (place - static_cast<double>(low));
}
double median(const std::vector<double>& values) { return quantile(values, 0.5); }

/// Samples of one series of rounds.
struct Series {
  std::vector<int> who;                      // the contestants without the first
  std::vector<double> first, again;          // the first contestant, twice in each round
  std::vector<std::vector<double>> seconds;  // of each of `who`
};

class Contest {
 public:
  Contest(int contestants, const std::function<double(int)>& sample, const ContestLimits& limits)
      : contestants_(contestants), sample_(sample), limits_(limits) {}

  Outcome hold() {
    Outcome outcome;
    const std::vector<int> finalists = heats(outcome);
    if (stopped_ || finalists.empty()) return decided(outcome);
    const Series final = rounds(finalists);
    if (stopped_) return outcome;
    outcome.default_seconds = outcome.seconds = median(final.first);
    outcome.noise = noise_of(final);
    const std::size_t best = best_of(final);
    const double gain = gain_of(final, best);
    if (!wins(final, best)) return decided(outcome);
    const Series repetition = rounds({finalists[best]});
    if (stopped_ || !wins(repetition, 0)) return decided(outcome);
    outcome.winner = finalists[best];
    outcome.default_seconds = median(repetition.first);
    outcome.seconds = median(repetition.seconds[0]);
    outcome.gain = std::min(gain, gain_of(repetition, 0));
    outcome.noise = std::max(outcome.noise, noise_of(repetition));
    if (outcome.gain - 1 <= outcome.noise) outcome.winner = 0, outcome.gain = 1, outcome.seconds = outcome.default_seconds;
    return decided(outcome);
  }

 private:
  Outcome decided(Outcome outcome) const {
    outcome.finished = !stopped_;
    return outcome;
  }

  double sample(int contestant) {
    if (stopped_ || (limits_.stops && limits_.stops())) {
      stopped_ = true;
      return std::numeric_limits<double>::infinity();
    }
    return sample_(contestant);
  }

  /// The contestants that are about as fast as the first or faster, at most three.
  std::vector<int> heats(Outcome& outcome) {
    constexpr int heat_rounds = 3;
    constexpr double hopeless = 1.5, close = 1.05;
    constexpr std::size_t places = 3;
    std::vector<double> best(static_cast<std::size_t>(contestants_), std::numeric_limits<double>::infinity());
    for (int round = 0; round < heat_rounds && !stopped_; ++round) {
      const double fastest = *std::ranges::min_element(best);
      for (std::size_t i = 0; i < best.size() && !stopped_; ++i) {
        if (round == 0 || i == 0 || best[i] < hopeless * fastest) best[i] = std::min(best[i], sample(static_cast<int>(i)));
      }
    }
    outcome.default_seconds = outcome.seconds = best[0];
    std::vector<int> order(best.size() - 1);
    std::iota(order.begin(), order.end(), 1);
    std::ranges::stable_sort(order, {}, [&](int i) { return best[static_cast<std::size_t>(i)]; });
    std::erase_if(order, [&](int i) { return !(best[static_cast<std::size_t>(i)] < close * best[0]); });
    if (order.size() > places) order.resize(places);
    return order;
  }

  Series rounds(std::vector<int> who) {
    Series series{.who = std::move(who), .first = {}, .again = {}, .seconds = {}};
    series.seconds.resize(series.who.size());
    const double limit = limits_.seconds / 2;  // the repetition may take the same time
    double total = 0;
    const auto take = [&](int contestant, std::vector<double>& into) {
      const double seconds = sample(contestant);
      total += seconds;
      into.push_back(seconds);
    };
    for (int round = 0; round < limits_.max_rounds && !stopped_; ++round) {
      if (round >= limits_.min_rounds && total > limit) break;
      take(0, series.first);
      for (std::size_t i = 0; i < series.who.size(); ++i) {  // the order changes from round to round
        const std::size_t at = (i + static_cast<std::size_t>(round)) % series.who.size();
        take(series.who[at], series.seconds[at]);
      }
      take(0, series.again);
    }
    return series;
  }

  static std::vector<double> ratios(const Series& series, std::size_t i) {
    std::vector<double> all;
    for (std::size_t round = 0; round < series.first.size(); ++round)
      all.push_back((series.first[round] + series.again[round]) / 2 / series.seconds[i][round]);
    return all;
  }
  static double gain_of(const Series& series, std::size_t i) { return median(ratios(series, i)); }

  /// The noise of the median of ratios: the difference of the first contestant's two times, plus three standard errors.
  double noise_of(const Series& series) const {
    std::vector<double> same;
    for (std::size_t round = 0; round < series.first.size(); ++round)
      same.push_back(series.first[round] / series.again[round]);
    const double deviation = (quantile(same, 0.75) - quantile(same, 0.25)) / 1.35;  // of a normal distribution
    const double error = 1.25 * deviation / std::sqrt(static_cast<double>(same.size()));
    return std::max(limits_.least_noise, std::abs(median(same) - 1) + 3 * error);
  }

  static std::size_t best_of(const Series& series) {
    std::size_t best = 0;
    for (std::size_t i = 1; i < series.who.size(); ++i) {
      if (gain_of(series, i) > gain_of(series, best)) best = i;
    }
    return best;
  }

  /// Whether it is faster by more than the noise, and faster at all in three of four rounds.
  bool wins(const Series& series, std::size_t i) const {
    const std::vector<double> all = ratios(series, i);
    return median(all) - 1 > noise_of(series) && quantile(all, 0.25) > 1;
  }

  int contestants_;
  const std::function<double(int)>& sample_;
  const ContestLimits& limits_;
  bool stopped_ = false;
};

}  // namespace

Outcome hold_contest(int contestants, const std::function<double(int)>& sample, const ContestLimits& limits) {
  return Contest(contestants, sample, limits).hold();
}

}  // namespace flash_attention::tuning
