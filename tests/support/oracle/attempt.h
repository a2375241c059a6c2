#pragma once

#include <string>
#include <vector>

#include "support/oracle/case.h"
#include "support/oracle/oracle.h"

namespace flash_attention::testing {

/// A kernel under test.
struct Target {
  Device device{};
  std::string kernel{};  // "" = the planner's choice
  Pass pass = Pass::forward;
  std::optional<TileSize> tile{};  // instead of the kernel's choice
  bool prepared = false;  // its masks are prepared before (prepare_mask), where they can be
};

bool is_backward(Pass pass);

/// Why the named kernel does not take the case; empty where it does.
std::string rejection(const Case& c, const Target& target);

/// Whether the kernel rounds products of 8-bit queries on the way (Case::narrow_products).
bool rounds_products(const Case& c, const Target& target);

/// What a call has to give: `plain` is the oracle's result with the roundings of plain attention in the case's type.
struct Expected {
  Inputs inputs;
  Results want, plain;
};

Expected expect(const Case& c, bool backward);

/// What a call gave. A backward pass starts from the exact out and lse.
struct Outcome {
  Results results;
  std::string written_gap;  // names a gap between elements that was written; "" where all are untouched
};

Outcome attempt(const Case& c, const Target& target, const Expected& expected);

/// One line for each of the first few elements that differ: NaN and Inf positions, then the error against twice that of
/// `plain` plus a floor. Of thousands of random problems a few have a `plain` that was lucky: they are given a `slack`.
std::vector<std::string> differences(const char* name, const std::vector<double>& got, const std::vector<double>& want,
                                     const std::vector<double>& plain, Dtype dtype, double slack = 1, double more = 0);

/// The same for every result of a pass, and for the gaps.
std::vector<std::string> differences(const Case& c, Pass pass, const Outcome& outcome, const Expected& expected,
                                     double slack = 1);
constexpr double random_slack = 2;

/// The largest size of a finite element.
double largest_of(const std::vector<double>& values);

/// Names the first result whose bits differ; "" where none does.
std::string first_changed(const Results& a, const Results& b);

}  // namespace flash_attention::testing
