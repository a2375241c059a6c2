#pragma once

#include <cstdlib>

#include "fuzz/generator/problems.h"
#include "support/cases/contract.h"
#include "support/long_tail.h"

namespace flash_attention::fuzz {

/// The seed of the arrays: FLASH_ATTENTION_FUZZ_SEED, so that a longer search sees other problems.
inline std::uint64_t array_seed() {
  const char* seed = std::getenv("FLASH_ATTENTION_FUZZ_SEED");
  return seed != nullptr ? std::strtoull(seed, nullptr, 10) : 1;
}

/// Compares one problem with the oracle. False: it failed.
inline bool check_problem(const GeneratedProblem& problem, testing::Target target, const testing::Expected& expected) {
  target.prepared = problem.number % 2 == 1;
  std::string text;
  try {
    for (const std::string& line : testing::differences(
             problem.c, target.pass, testing::attempt(problem.c, target, expected), expected, testing::random_slack))
      text += "\n  " + line;
  } catch (const Error& error) {
    text = std::string("\n  ") + error.what();
  }
  if (text.empty()) return true;
  ADD_FAILURE() << "problem " << problem.number << " of seed " << problem.seed << ", " << to_string(target.pass) << " "
                << target.kernel << ": " << problem.c.name << "\n  " << to_string(problem.c.problem) << text;
  return false;
}

}  // namespace flash_attention::fuzz
