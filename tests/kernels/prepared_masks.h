#pragma once

#include "kernels/emulated.h"

namespace flash_attention::testing {

struct PreparedCase {
  const char* kernel;
  int arch;
  Case c;
};

/// Compares the results of prepared masks with the oracle, and the bits of forward with those of a call that finds out
/// about its masks itself.
inline void check_prepared(const PreparedCase& given, Device device) {
  const auto& [kernel, arch, c] = given;
  const Pass pass = std::string(kernel).starts_with("forward") ? Pass::forward : Pass::backward;
  const Target itself{.device = device, .kernel = kernel, .pass = pass};
  ASSERT_EQ(rejection(c, itself), "");
  Target prepared = itself;
  prepared.prepared = true;
  const Expected expected = expect(c, is_backward(pass));
  const Outcome first = attempt(c, prepared, expected);
  for (const std::string& line : differences(c, pass, first, expected)) ADD_FAILURE() << line;
  if (pass == Pass::backward) return;  // its sums have no order
  EXPECT_EQ(first_changed(first.results, attempt(c, itself, expected).results), "");
}

inline std::vector<PreparedCase> prepared_cases() {
  std::vector<PreparedCase> cases;
  const auto add = [&](const char* kernel, int arch, const char* name, int rows, int document, int bounds,
                       void (*change)(Case&, Problem&)) {
    cases.push_back({kernel, arch, documents_case(name, rows, document, bounds, change)});
  };
  const auto causal = [](Case&, Problem& p) { p.causal = true; };
  const auto bytes = [](Case&, Problem& p) { p.mask = over(p, false, true, true), p.causal = true; };
  const auto nan_behind = [](Case& c, Problem&) { c.nan_value = 270; };
  // Row tiles by a counter, words that warps of the kernel make, and words of all heads that come with the map.
  add("forward/sm90", 90, "documents", 521, 300, 1, causal);
  add("forward/sm90", 90, "nan_behind", 521, 260, 4, nan_behind);
  add("forward/sm90", 90, "many_heads", 389, 200, 1,
      [](Case& c, Problem& p) { p.heads_q = 8, p.causal = true, c.nan_value = 210; });
  add("forward/sm90", 90, "bytes", 389, 0, 0, bytes);
  add("forward/sm90", 90, "used_rows", 270, 0, 0, [](Case& c, Problem& p) {
    p.batch = 2, p.mask = over(p, true, true, true), p.window_left = 90, p.causal = true;
    p.seqused_q = p.seqused_kv = p.left_padding = true;
    c.seqused_q = {200, 270}, c.seqused_kv = {270, 151}, c.left_padding = {70, 5};
  });
  add("forward/sm80", 80, "documents", 389, 200, 1, causal);
  add("forward/sm80", 80, "bytes", 389, 0, 0, bytes);
  add("forward/portable", 80, "documents", 200, 90, 4, [](Case& c, Problem&) { c.nan_value = 150; });
  add("backward/sm90", 90, "documents", 521, 200, 1, causal);
  add("backward/sm90", 90, "bytes", 389, 0, 0, bytes);
  add("backward/sm90", 90, "apart", 389, 150, 4, [](Case& c, Problem& p) { p.deterministic = true, c.nan_key = 160; });
  add("backward/sm80", 80, "documents", 389, 200, 1, causal);
  add("backward/portable", 80, "documents", 200, 90, 4, causal);
  return cases;
}

inline std::string prepared_name(const ::testing::TestParamInfo<PreparedCase>& info) {
  std::string kernel = info.param.kernel;
  kernel[kernel.find('/')] = '_';
  return kernel + "_" + info.param.c.name;
}

}  // namespace flash_attention::testing
