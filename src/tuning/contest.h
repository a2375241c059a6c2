#pragma once

#include <functional>
#include <vector>

namespace flash_attention::tuning {

struct ContestLimits {
  double seconds = 1;           // of samples, for all rounds together
  int min_rounds = 5;           // of the final, and of its repetition
  int max_rounds = 60;          // the same
  double least_noise = 0.01;    // a smaller gain is not worth another kernel
  std::function<bool()> stops{};  // called between samples
};

struct Outcome {
  int winner = 0;             // 0: the first contestant stays
  double default_seconds = 0;  // of the first contestant: the median, or the best of the heats if there was no final
  double seconds = 0;         // of the winner
  double gain = 1;            // the median of the ratios of a round; the smaller of final and repetition
  double noise = 0;           // of that ratio
  bool finished = false;      // false: it was stopped, and nothing is known
};

/// Finds out whether one of some contestants is faster than the first. `sample` measures one of them once.
///
/// Heats: each is measured a few times; contestants much slower than the best are out. Final: the first contestant and
/// the three best are measured alternately. The first one is measured twice in a round, so that its two times show the
/// noise. Then a repetition between only the first and the best must confirm the result, because the best of many may
/// just have been lucky. A winner is faster by more than the noise in both.
Outcome hold_contest(int contestants, const std::function<double(int)>& sample, const ContestLimits& limits);

}  // namespace flash_attention::tuning
