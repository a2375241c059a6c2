#pragma once

#include <string>
#include <vector>

#include "cli/measure/measure.h"
#include "cli/output/json.h"

namespace flash_attention::cli {

/// The problem that the ladder's table is about: 16384 tokens, 16 heads of 128, bfloat16.
Problem ladder_problem(bool causal);

/// The same with Q, K and V of 8 bits, for a rung that takes no other.
Problem in_8_bits(Problem problem);

/// A rung on a problem: measured, or why not.
struct LadderRow {
  std::string kernel;
  Problem problem;
  Pass pass = Pass::forward;
  double ms = 0, p10 = 0, p90 = 0;
  int samples = 0;
  double tflops = 0;
  std::string reason;
};

/// What was measured on one machine. Its file has the format of bench/ (flash_attention.results/1).
struct LadderResults {
  std::string device;
  std::vector<LadderRow> rows;

  /// TFLOP/s of the rung on ladder_problem(causal); 0 where not measured.
  double tflops(const std::string& kernel, bool causal) const;
};

LadderRow to_row(const Measurement& measurement);
Json to_json(const LadderResults& results, const DeviceInfo& info);
LadderResults results_from(std::string_view text, const std::string& name);

/// The figures of the H200 that came with the source; no rows if there are none.
LadderResults recorded_results();

}  // namespace flash_attention::cli
