#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "support/long_tail.h"
#include "support/oracle/attempt.h"

namespace flash_attention::testing {

/// The contract as a list of small problems. One list for every backend and kernel; each test program says which kernels it
/// puts through it.
std::vector<Case> contract_cases(Dtype dtype);

/// The same for hidden rows and block masks, forward and backward.
std::vector<Case> mask_cases(Dtype dtype);

/// The same for lists of keys, and of blocks of them.
std::vector<Case> list_cases(Dtype dtype);

/// Forward over lists, with pages, left padding and latent keys.
std::vector<Case> list_cache_cases(Dtype dtype);
/// Some of both with all statistics, through which gradients flow.
std::vector<Case> statistics_cases(Dtype dtype);

/// The part of the contract that only forward has: K and V in pages, left padding.
std::vector<Case> cache_cases(Dtype dtype);

/// Bit masks of keys and of drafts, and windows of sequences; forward only.
std::vector<Case> bit_cases(Dtype dtype);

/// Latent keys, which begin with their values; forward only.
std::vector<Case> latent_cases(Dtype dtype);

/// Keys and values of 8 bits, of every type and with every kind of scale.
std::vector<Case> narrow_key_cases(Dtype dtype);

/// Keys and values of 4 bits: every format and group, in rows and pages.
std::vector<Case> group_cases(Dtype dtype);

/// Queries of 8 bits beside them; dtype is that of the output.
std::vector<Case> narrow_query_cases(Dtype dtype);

/// A few of the cases: enough for a second type, whose only difference is how elements are rounded. In the long tail all.
inline std::vector<Case> some_of(const std::vector<Case>& cases, std::size_t one_in = 8) {
  std::vector<Case> some;
  for (std::size_t i = 0; i < cases.size(); i += with_long_tail() ? 1 : one_in) some.push_back(cases[i]);
  return some;
}

/// The same results, to the bit, as from the 16-bit keys and values that the codes and scales of a case are worth; the
/// scales become powers of two.
void check_narrow_bits(Case c, const Target& target);

/// Runs one case and compares every result with the oracle (support/oracle/attempt.h); gaps must be untouched. A case that
/// the named kernel does not support is skipped only if its reject() says so.
void check(const Case& c, const Target& target);

/// The comparison alone: `plain` is the oracle's result with the rounding of that type.
void compare(const char* name, const std::vector<double>& got, const std::vector<double>& want,
             const std::vector<double>& plain, Dtype dtype);

/// The same bits twice. before_run(0) and before_run(1) come before the runs.
void check_reproducible(const Case& c, const Target& target, const std::function<void(int)>& before_run = {});

/// For INSTANTIATE_TEST_SUITE_P.
inline std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  return info.param.name + "_" + std::string(to_string(info.param.problem.dtype));
}

inline void PrintTo(const Case& c, std::ostream* out) { *out << c.name << ": " << to_string(c.problem); }

}  // namespace flash_attention::testing
