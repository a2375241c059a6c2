#pragma once

#include <string>

#include "abi/append.h"
#include "abi/config.h"

namespace flash_attention::plan {

/// C++ source of a configuration, for Launch::config: "ForwardConfig{.features = {...}, .head_dim = 64, ...}".
std::string to_source(const abi::ForwardConfig& config);
std::string to_source(const abi::BackwardConfig& config);
std::string to_source(const abi::AppendConfig& config);

}  // namespace flash_attention::plan
