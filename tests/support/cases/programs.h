#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "flash_attention/attention.h"
#include "program/program.h"

namespace flash_attention::testing {

/// A program with what it captures, drawn at random: ints, floats and bools through every operation that has a finite
/// result, comparisons of ints alone (floats would fall on either side by rounding).
struct RandomProgram {
  explicit RandomProgram(unsigned seed, bool with_score = true, bool with_mask = true);
  explicit RandomProgram(const std::string& given);  ///< not random: this text, which captures t0 at most

  std::string text;
  std::vector<float> reals;        // t0, [11]
  std::vector<std::int32_t> ints;  // t1, [3, 17]
  std::vector<double> scalars;     // s0 int, s1 float
  bool with_gradient = true;       // of t0, where the program has a score
  program::Program parsed;

  // For differences: what `detach` gives stays where it was.
  const RandomProgram* still = nullptr;
  double still_score = 0;

  void describe(Problem& problem) const;
  std::vector<const void*> pointers() const { return {reals.data(), ints.data()}; }

  /// A node in fp64, written from docs/numerics.md.
  double value(int node, double score, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const;
  double score(double score, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const;
  bool visible(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const;
};

/// Forward and backward of a dense problem with a program, on a device and in fp64.
struct ProgramResults {
  std::vector<double> out, lse, dq, dk, dv, dreals;
};
struct KernelPair {
  std::string forward{}, backward{};  // "": the planner's choice
  int poison = 0;                     // keys j with j % poison = 0 are NaN, and their values Inf; 0: none
  std::function<void(const Problem&, Pass, const Buffers&)> call{};  // in the place of a pass; empty: none
};
ProgramResults run_program(const Problem& problem, const RandomProgram& random, const Options& options, unsigned seed,
                           const KernelPair& kernels = {});
ProgramResults exact_program(const Problem& problem, const RandomProgram& random, unsigned seed);

/// The largest difference, relative to the largest of `expected` where that is above 1.
double difference(const std::vector<double>& got, const std::vector<double>& expected);

}  // namespace flash_attention::testing
