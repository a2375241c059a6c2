#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "flash_attention/tune.h"

namespace flash_attention::tuning {

std::vector<TuneCase> parse_cases(std::string_view text, const std::string& name);
std::vector<TuneCase> usual_cases(const DeviceInfo& device);

}  // namespace flash_attention::tuning
