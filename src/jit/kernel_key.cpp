#include "jit/kernel_key.h"

#include <algorithm>

namespace flash_attention::jit {
namespace {

std::string flat(std::string unit) {
  std::ranges::replace(unit, '/', '_');
  return unit;
}

}  // namespace

KernelKey make_key(const Launch& launch, int arch) {
  return {launch.unit,      launch.entry,  to_source(launch.config), arch, launch.block, launch.min_blocks_per_sm, false,
          launch.arguments, launch.prelude};
}

std::vector<KernelKey> make_keys(const Plan& plan, int arch) {
  std::vector<KernelKey> keys;
  for (const Launch& launch : plan.launches) keys.push_back(make_key(launch, arch));
  return keys;
}

std::string to_string(const KernelKey& key) {
  std::string text = key.unit;
  if (key.entry != flat(key.unit)) text += " " + key.entry;
  text += " " + arch_name(key.arch);
  return key.config.empty() ? text : text + " " + key.config;
}

std::string file_stem(const KernelKey& key) {
  const std::string unit = flat(key.unit);
  return (key.entry.starts_with(unit) ? key.entry : unit + "_" + key.entry) + "-" + arch_name(key.arch);
}

std::string arch_name(int arch) { return "sm_" + std::to_string(arch) + (arch >= 90 ? "a" : ""); }

std::string emit(const KernelKey& key, const std::string& kernel_file) {
  const std::string bounds = std::to_string(key.block_threads) + ", " + std::to_string(key.min_blocks_per_sm);
  std::string text = "// " + key.unit + " for " + arch_name(key.arch) + "\n";
  if (key.plain) return text + "extern \"C\" {\n#include \"" + kernel_file + "\"\n}\n";
  text += key.prelude + "#include \"" + kernel_file + "\"\n\n";
  text += "using namespace flash_attention;\nusing namespace flash_attention::abi;\n\n";
  text += "extern \"C\" __global__ void __launch_bounds__(" + bounds + ") kernel(const __grid_constant__ " + key.arguments +
          " args) {\n";
  text += "  " + key.entry + (key.config.empty() ? "" : "<" + key.config + ">") + "(args);\n}\n";
  return text;
}

}  // namespace flash_attention::jit
