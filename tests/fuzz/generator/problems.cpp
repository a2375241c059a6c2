#include "fuzz/generator/problems.h"

#include "fuzz/generator/cover.h"

namespace flash_attention::fuzz {

std::uint64_t configuration_seed(std::uint64_t seed, int number, int share) {
  return seed * 0x9E3779B97F4A7C15ull + static_cast<std::uint64_t>(number / share);
}

std::vector<GeneratedProblem> problems(const Domain& domain, int share, std::uint64_t seed, const Sizes& sizes) {
  std::vector<GeneratedProblem> all;
  for (const Row& row : cover(domain, share, seed)) {
    const int number = static_cast<int>(all.size());
    const std::uint64_t base = seed * 0x9E3779B97F4A7C15ull;
    const std::uint64_t configuration = configuration_seed(seed, number, share);
    all.push_back({seed, number, row, draw_case(row, configuration, base + 0x100000 + number, sizes)});
  }
  return all;
}

std::vector<GeneratedProblem> problems(std::string_view kernel, int share, std::uint64_t seed, const Sizes& sizes) {
  const Domain domain = domain_of(kernel);
  return kernel.ends_with("/listed") ? listed_problems(domain, share, seed, sizes) : problems(domain, share, seed, sizes);
}

std::vector<GeneratedProblem> listed_problems(const Domain& domain, int share, std::uint64_t seed, const Sizes& sizes) {
  std::vector<GeneratedProblem> all;
  const std::uint64_t base = seed * 0x9E3779B97F4A7C15ull;
  for (const ListedRow& listed : with_lists(cover(domain, share, seed), share, seed)) {
    const int number = static_cast<int>(all.size());
    all.push_back({seed, number, listed.row,
                   draw_case(listed.row, configuration_seed(seed, number, share), base + 0x100000 + number, sizes),
                   listed.lists});
    list_keys(all.back().c, listed.lists, base + 0x200000 + number);
  }
  return all;
}

}  // namespace flash_attention::fuzz
