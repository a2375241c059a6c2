#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cli/problem/arguments.h"
#include "flash_attention/attention.h"

namespace flash_attention::cli {

/// One line of a benchmark.
struct Case {
  std::string set;
  Problem problem;
  Pass pass;
};

struct CaseSet {
  std::string_view name;
  std::string_view about;
};
const std::vector<CaseSet>& case_sets();

/// The cases of a set, sized for the device. Flags given by the user (--head-dim, --dtype, ...) replace the set's own.
std::vector<Case> make_cases(std::string_view set, Device device, const Arguments& arguments);

}  // namespace flash_attention::cli
