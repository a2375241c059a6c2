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

/// The threads of the CPU backend.
enum class ThreadSource : std::uint8_t {
  automatic,  // those of a loaded OpenMP runtime, otherwise its own
  own,
  openmp,  // none if no runtime is loaded
};

/// When to test a kernel that has never run on such a GPU.
enum class Qualify : std::uint8_t {
  never,      // do not use such kernels
  first_use,  // once on this GPU
  always,     // at its first use in each process, and on the emulator, too
};

/// All settings from the environment. They are read once; the rest of the library uses settings().
struct Settings {
  std::filesystem::path cache_dir;  // the folder of compiled kernels
  // when the cache exceeds this, the oldest entries are removed
  std::int64_t cache_limit_bytes = std::int64_t{1} << 30;
  std::filesystem::path aot_dir;                         // read-only kernels made ahead of time; empty: none
  bool jit = true;                                       // false: never compile, only use kernels in the caches
  std::filesystem::path nvrtc;                           // the NVRTC library, or the folder it is in; empty: search
  std::string nvrtc_options;                             // more options for NVRTC, separated by spaces
  std::filesystem::path driver;                          // the CUDA driver library; empty: libcuda.so.1
  std::filesystem::path kernel_dir;                      // read kernel sources from here; empty: those in the library
  std::optional<CpuIsa> cpu_isa;                         // empty: the best one of this CPU
  int threads = 0;                                       // the most threads of the CPU backend; 0: one for each core
  ThreadSource thread_source = ThreadSource::automatic;  // the threads of the CPU backend
  bool check = false;                                    // compare rows of every call with fp64
  bool invariant = false;                                // the default of Problem::invariant
  bool tuned = true;                                     // use the choices of `flash-attention tune`
  Qualify qualify = Qualify::first_use;                  // kernels that have never run on such a GPU
  std::filesystem::path record;                          // a file to which called problems are added; empty: none
  std::uint64_t emulator_seed = 0;                       // of the emulator's schedule
  std::string cxx = "c++";                               // the compiler of the emulator
  std::string cxx_flags;                                 // more flags for it, separated by spaces

  // General variables, not of this library: where to look for NVRTC. Empty if unset, or not a full path.
  std::filesystem::path home;
  std::filesystem::path cuda_home;
  std::filesystem::path conda_prefix;
  std::filesystem::path virtual_env;
};

/// The value of an environment variable, or nullptr.
using Environment = std::function<const char*(const char* name)>;

/// Throws Error(invalid_argument), which names the variable, its value and what is allowed.
Settings read_settings(const Environment& environment);

/// The process's settings, read at the first call.
const Settings& settings();

/// Whether FLASH_ATTENTION_INVARIANT is on. Every Problem reads it, even one that is made before main(). So this reads
/// no other setting and never throws. The first call refuses a value that is not allowed.
bool invariant_in_environment() noexcept;

/// Whether the environment has been read, or is being read. Before that a child of fork() may still change it.
bool settings_in_use();

/// One variable in the form of the documentation.
struct SettingDescription {
  std::string_view variable;
  std::string_view allowed;
  std::string_view initially;
  std::string_view meaning;
};
std::span<const SettingDescription> setting_descriptions();

}  // namespace flash_attention::support
