#pragma once

#include <string>
#include <variant>

#include "abi/append.h"
#include "abi/config.h"
#include "flash_attention/plan.h"

namespace flash_attention::plan {

/// The content of a LaunchConfig. src/jit prints it.
struct KernelConfig {
  std::variant<std::string, abi::ForwardConfig, abi::BackwardConfig, abi::AppendConfig> value;
};

/// A configuration for Launch::config.
template <class Config>
LaunchConfig launch_config(const Config& config) {
  return LaunchConfig(std::make_shared<const KernelConfig>(KernelConfig{config}));
}

/// The configuration of a launch; null if it has another type.
template <class Config>
const Config* config_of(const Launch& launch) {
  return launch.config.value() == nullptr ? nullptr : std::get_if<Config>(&launch.config.value()->value);
}

/// The features of a launch; null if it has none.
inline const abi::Features* features_of(const Launch& launch) {
  if (const auto* config = config_of<abi::ForwardConfig>(launch)) return &config->features;
  const auto* config = config_of<abi::BackwardConfig>(launch);
  return config == nullptr ? nullptr : &config->features;
}

}  // namespace flash_attention::plan
