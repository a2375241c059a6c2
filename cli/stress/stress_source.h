#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/stress/stress_run.h"
#include "fuzz/generator/problems.h"
#include "support/oracle/attempt.h"

namespace flash_attention::cli {

/// The kernels a problem goes through.
std::vector<testing::Target> targets_of(const testing::Case& c, const StressOptions& options);

/// What the device's compiler has to make to run a problem: a text for each kernel. None on the CPU.
std::set<std::string> kernels_of(const testing::Case& c, const std::vector<testing::Target>& targets);

/// The kernel out of whose domain the array of a seed is drawn.
std::string domain_of_seed(std::uint64_t seed, const StressOptions& options);

/// The problems one after another: a configuration of each array in turn, so that a short run has seen all kinds; of those,
/// every `parts`-th. Behind each problem come its variants.
class StressSource {
 public:
  explicit StressSource(const StressOptions& options);

  /// False if there is no more.
  bool next(fuzz::GeneratedProblem& problem);

 private:
  struct Array {
    std::uint64_t seed;
    std::vector<fuzz::GeneratedProblem> problems{};
    std::size_t at = 0;
  };

  bool next_of_arrays(fuzz::GeneratedProblem& problem);
  bool the_only(fuzz::GeneratedProblem& problem);
  bool next_variant(fuzz::GeneratedProblem& problem);
  std::vector<fuzz::GeneratedProblem> array_of(std::uint64_t seed) const;

  const StressOptions& options_;
  std::vector<Array> arrays_;
  std::size_t turn_ = 0;
  std::int64_t configuration_ = 0;  // counted over all arrays
  bool given_ = false;

  fuzz::GeneratedProblem first_{};  // whose variants come next
  std::set<std::string> compiled_;  // for it
  int variants_left_ = 0;
  int drawn_ = 0;  // of its variants
};

}  // namespace flash_attention::cli
