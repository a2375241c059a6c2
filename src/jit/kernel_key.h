#pragma once

#include <compare>
#include <string>
#include <vector>

#include "flash_attention/plan.h"

namespace flash_attention::jit {

/// What distinguishes compiled kernels: a Launch without its sizes, for an architecture.
struct KernelKey {
  std::string unit;    // "forward/portable"
  std::string entry;   // "forward_portable"
  std::string config;  // "ForwardConfig{...}"; empty: the entry is not a template
  int arch = 0;        // compute capability, 90 for 9.0
  int block_threads = 1;
  int min_blocks_per_sm = 1;
  bool plain = false;                       // the entry is a __global__ function of the file, with its own parameters
  std::string arguments = "AttentionArgs";  // the type of the entry's parameter
  std::string prelude{};                    // before the kernel: a program's source

  friend auto operator<=>(const KernelKey&, const KernelKey&) = default;
};

KernelKey make_key(const Launch& launch, int arch);
std::vector<KernelKey> make_keys(const Plan& plan, int arch);

/// "forward/portable sm_90a ForwardConfig{...}"; with the entry if it differs from the unit's name.
std::string to_string(const KernelKey& key);

/// The beginning of its file names: "forward_portable-sm_90a".
std::string file_stem(const KernelKey& key);

/// NVRTC's name of the architecture: "sm_80", "sm_90a". From 9.0 on it includes features that only this architecture
/// has.
std::string arch_name(int arch);

/// The translation unit: a few lines that include the kernel and instantiate it as `extern "C" kernel`. NVRTC and the
/// emulator compile it, and the cache keeps it next to the cubin.
std::string emit(const KernelKey& key, const std::string& kernel_file);

}  // namespace flash_attention::jit
