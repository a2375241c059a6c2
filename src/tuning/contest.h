#pragma once

#include <functional>
#include <vector>

namespace flash_attention::tuning {

struct ContestLimits {
  double seconds = 1;           // of samples, for all rounds together
  int min_rounds = 5;           // of the final and of its repetition
  int max_rounds = 60;          // the same
  double least_noise = 0.01;    // a smaller gain is not worth another kernel
  std::function<bool()> stops{};  // asked between samples
};

struct Outcome {
  int winner = 0;             // 0: the first contestant stays
  double default_seconds = 0;  // of the first contestant; median, or the least of the heats where there was no final
  double seconds = 0;         // of the winner
  double gain = 1;            // the median of the ratios of a round; the smaller one of final and repetition
  double noise = 0;           // of that ratio
  bool finished = false;      // else it was stopped, and nothing is known
};

/// Whether one of some contestants is faster than the first. `sample` measures one of them once.
///
/// Heats: each a few times; who is much slower than the best is out. Final: the first contestant and the three best take
/// turns, the first one twice in a round, so that its two times in the same rounds say what noise is. A repetition between the
/// first and the best alone must come to the same: the best of many is otherwise the luckiest. A winner is faster by more
/// than the noise in both.
Outcome hold_contest(int contestants, const std::function<double(int)>& sample, const ContestLimits& limits);

}  // namespace flash_attention::tuning
