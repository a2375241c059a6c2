#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "check/call.h"
#include "program/program.h"

namespace flash_attention::check {

/// A value of a program, and how far a kernel, which computes in float, may be from it.
struct ProgramValue {
  double real = 0;
  double error = 0;          // of real; infinite if an earlier choice is open
  std::int32_t integer = 0;  // or a bool
  bool open = false;         // integer may be another one: it is computed from a real number too close to a step
};

/// The program of a call, applied to a score.
class ProgramScore {
 public:
  explicit ProgramScore(const Call& call);

  struct Pair {
    std::int64_t b, head, i, j;
  };
  struct Result {
    bool visible = true;
    ProgramValue score;  // the new one
    ProgramValue slope;  // its derivative by the old one
  };
  /// The score is NaN if a kernel may or may not have seen the key.
  Result at(const Pair& pair, double score, double error) const;

 private:
  ProgramValue value_of(const program::Node& node, const Pair& pair, const ProgramValue& score) const;
  ProgramValue load(const program::Node& node) const;

  const Call& call_;
  program::Program program_;
  int slope_ = -1;  // a node; -1: it is 0 everywhere
  std::vector<program::Node> nodes_;
  mutable std::vector<ProgramValue> values_;                                            // of the nodes at one pair
  mutable std::map<std::pair<int, std::int64_t>, std::vector<ProgramValue>> elements_;  // of a tensor, by blocks
};

}  // namespace flash_attention::check
