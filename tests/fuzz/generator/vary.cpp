#include "fuzz/generator/vary.h"

#include <random>

#include "fuzz/generator/sight.h"

namespace flash_attention::fuzz {
namespace {

bool fits(const Row& row, const Domain& domain, int factor, int level) {
  if (!domain.has(factor, level)) return false;
  for (int other = 0; other < num_factors; ++other) {
    if (other != factor && !go_together(static_cast<Factor>(factor), level, static_cast<Factor>(other), row[other]))
      return false;
  }
  return true;
}

/// Every other factor that is known when a kernel runs gets any level that goes with the rest; seldom one that leaves
/// nothing to see.
Row vary(Row row, const Domain& domain, std::mt19937_64& random) {
  for (int factor = num_compiled; factor < num_factors; ++factor) {
    if (random() % 2 == 0) continue;
    std::vector<int> levels;
    for (int level = 0; level < static_cast<int>(levels_of(static_cast<Factor>(factor)).size()); ++level)
      if (fits(row, domain, factor, level)) levels.push_back(level);
    int drawn = levels[random() % levels.size()];
    if (is_blank(factor, drawn) && random() % 4 != 0) drawn = levels[random() % levels.size()];
    row[factor] = drawn;
  }
  return row;
}

}  // namespace

GeneratedProblem vary(const GeneratedProblem& problem, const Domain& domain, int share, int variant, const Sizes& sizes) {
  std::mt19937_64 random((problem.seed * 0x9E3779B97F4A7C15ull + problem.number) * 0x10001 + variant);
  GeneratedProblem other = problem;
  other.variant = variant;
  if (variant >= values_alone) {
    other.c.seed = random();
    return other;
  }
  other.row = vary(problem.row, domain, random);
  if (other.lists && !go_together(other.row, *other.lists)) other.row = problem.row;
  other.c = draw_case(other.row, configuration_seed(problem.seed, problem.number, share), random(), sizes);
  if (other.lists) list_keys(other.c, *other.lists, random());
  return other;
}

}  // namespace flash_attention::fuzz
