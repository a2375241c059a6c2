#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "fuzz/generator/draw_case.h"
#include "fuzz/generator/lists.h"

namespace flash_attention::fuzz {

struct GeneratedProblem {
  std::uint64_t seed;  // of its covering array
  int number;          // in the array
  Row row;
  testing::Case c;
  std::optional<Lists> lists = {};  // of keys, in arrays of kernels that take nothing else
  int variant = 0;                  // vary.h; 0: the array's own
};

/// The seed of what the problems of one configuration share.
std::uint64_t configuration_seed(std::uint64_t seed, int number, int share);

/// The problems of one covering array over what the kernel takes (domain_of), `share` of them in a row for one
/// configuration. The same for the same arguments, on every machine.
std::vector<GeneratedProblem> problems(std::string_view kernel, int share, std::uint64_t seed, const Sizes& sizes = {});
std::vector<GeneratedProblem> problems(const Domain& domain, int share, std::uint64_t seed, const Sizes& sizes = {});
/// The same with lists of keys.
std::vector<GeneratedProblem> listed_problems(const Domain& domain, int share, std::uint64_t seed, const Sizes& sizes = {});

}  // namespace flash_attention::fuzz
