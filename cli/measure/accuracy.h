#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/measure/workload.h"

namespace flash_attention::cli {

/// How far a result is from the same attention in fp64, on a sample of its rows.
struct Accuracy {
  std::string tensor;       ///< "out", "lse", "dq", ...
  double max_error = 0;     ///< largest |result - reference|
  double relative_rms = 0;  ///< rms(result - reference) / rms(reference), or / 1 if that is zero
  double allowed = 0;       ///< bound on relative_rms
  std::int64_t rows = 0;    ///< rows compared
  std::int64_t of_rows = 0;

  bool ok() const { return relative_rms <= allowed; }
};

/// Downloads the results and compares them with src/check. Rows of gradients take lse and out from the forward pass, which
/// is itself compared.
std::vector<Accuracy> check_forward(const Workload& workload, std::int64_t max_rows = 64);
std::vector<Accuracy> check_backward(const Workload& workload, std::int64_t max_rows = 24);

}  // namespace flash_attention::cli
