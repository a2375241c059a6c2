#pragma once

#include <string>

#include "cli/measure/measure.h"
#include "cli/output/json.h"

namespace flash_attention::cli {

Json to_json(const Problem& problem);
Json to_json(const DeviceInfo& info);
Json to_json(const Measurement& measurement);

/// "cpu: AMD EPYC 9B14, avx512, 2 threads", "cuda:0: NVIDIA H200, sm_90, 132 SMs".
std::string describe(const DeviceInfo& info);

/// The accuracy in a few words: "1.2e-07 ok" or "3.0e-01 WRONG".
std::string describe(const std::vector<Accuracy>& accuracy);

/// Writes a file in one go; throws Error(invalid_argument) if it cannot.
void save(const std::string& path, const std::string& text);

}  // namespace flash_attention::cli
