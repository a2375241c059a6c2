#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "flash_attention/device.h"

namespace flash_attention::support {

/// Whose threads the CPU backend runs on.
enum class ThreadSource : std::uint8_t {
  automatic,  // those of an OpenMP runtime that is loaded, else its own
  own,
  openmp,  // and none where no runtime is loaded
};

/// When a kernel that was never run on such a GPU is tested.
enum class Qualify : std::uint8_t {
  never,      // and not used
  first_use,  // on this GPU, once
  always,     // at its first use in each process, on the emulator, too
};

/// Everything the library takes from the environment. Read once; the rest of the library asks settings().
struct Settings {
  std::filesystem::path cache_dir;                         // where compiled kernels are kept
  std::int64_t cache_limit_bytes = std::int64_t{1} << 30;  // the oldest entries go when the cache grows past this
  std::filesystem::path aot_dir;                           // read-only kernels made ahead of time; empty: none given
  bool jit = true;                                         // false: never compile, only use what is in the caches
  std::filesystem::path nvrtc;                             // the NVRTC library, or the folder it is in; empty: search
  std::string nvrtc_options;                               // more options for NVRTC, separated by spaces
  std::filesystem::path driver;                            // the CUDA driver library; empty: libcuda.so.1
  std::filesystem::path kernel_dir;                        // read the kernel sources from here; empty: those in the library
  std::optional<CpuIsa> cpu_isa;                           // empty: the best this CPU has
  int threads = 0;                                         // of the CPU backend, at most; 0: one a core
  ThreadSource thread_source = ThreadSource::automatic;    // whose threads the CPU backend runs on
  bool check = false;                                      // compare rows of every call with fp64
  bool invariant = false;                                  // the default of Problem::invariant
  bool tuned = true;                                       // use what `flash-attention tune` found
  Qualify qualify = Qualify::first_use;                    // kernels that were never run on such a GPU
  std::filesystem::path record;                            // a file of the problems that are called; empty: none
  std::uint64_t emulator_seed = 0;                         // of the emulator's schedule
  std::string cxx = "c++";                                 // the compiler of the emulator
  std::string cxx_flags;                                   // more flags for it, separated by spaces

  // Of the surroundings rather than of this library: where to look for NVRTC. Empty where not set, or
  // not a full path.
  std::filesystem::path home;
  std::filesystem::path cuda_home;
  std::filesystem::path conda_prefix;
  std::filesystem::path virtual_env;
};

/// The value of an environment variable, or nullptr.
using Environment = std::function<const char*(const char* name)>;

/// Throws Error(invalid_argument) that names the variable, its value and what is allowed.
Settings read_settings(const Environment& environment);

/// The process's settings, read at the first call.
const Settings& settings();

/// Whether FLASH_ATTENTION_INVARIANT is on. Every Problem asks, also one that is made before main(): so this reads no other
/// setting and never throws. The first call refuses a value that is not allowed.
bool invariant_in_environment() noexcept;

/// Whether the environment has been read, or is being read: until then a child of fork() may still change it.
bool settings_in_use();

/// One variable as the documentation has it.
struct SettingDescription {
  std::string_view variable;
  std::string_view allowed;
  std::string_view initially;
  std::string_view meaning;
};
std::span<const SettingDescription> setting_descriptions();

}  // namespace flash_attention::support
