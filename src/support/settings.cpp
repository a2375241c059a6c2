#include "support/settings.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <charconv>
#include <cstdlib>

#include "flash_attention/error.h"

namespace flash_attention::support {
namespace {

constexpr SettingDescription descriptions[] = {
    {"FLASH_ATTENTION_CACHE_DIR", "a folder", "$XDG_CACHE_HOME/flash_attention, else ~/.cache/flash_attention",
     "where compiled kernels are kept"},
    {"FLASH_ATTENTION_CACHE_LIMIT", "bytes, with K, M or G", "1G",
     "the least recently used entries are removed when the cache grows past this; 0 keeps nothing on disk"},
    {"FLASH_ATTENTION_AOT_DIR", "a folder", "flash_attention_kernels beside the library or its Python package",
     "kernels compiled ahead of time; only read"},
    {"FLASH_ATTENTION_JIT", "on, off", "on", "off: never compile at run time; a kernel that is in no cache is an error"},
    {"FLASH_ATTENTION_NVRTC", "the full path of a file or a folder", "searched", "the NVRTC library to use, and no other"},
    {"FLASH_ATTENTION_NVRTC_OPTIONS", "options", "none", "more options for NVRTC, e.g. -lineinfo for a profiler"},
    {"FLASH_ATTENTION_DRIVER", "a file", "libcuda.so.1", "the CUDA driver library"},
    {"FLASH_ATTENTION_KERNEL_DIR", "a folder", "the sources in the library",
     "kernels/ of a source tree, read at run time: edit a kernel without building the library"},
    {"FLASH_ATTENTION_CPU_ISA", "generic, neon, avx2, avx512, avx512_bf16, amx", "the best there is",
     "instruction set of the CPU backend"},
    {"FLASH_ATTENTION_THREADS", "1 to 4096", "one a core",
     "threads of the CPU backend, the caller included; of an OpenMP team at most so many"},
    {"FLASH_ATTENTION_THREAD_SOURCE", "auto, own, openmp", "auto",
     "whose threads the CPU backend runs on: those of a loaded OpenMP runtime (torch's), or its own; auto: the first there "
     "is"},
    {"FLASH_ATTENTION_CHECK", "on, off", "off",
     "on: some rows of every call are compared with fp64 on the host; a call that differs is an error. Slow"},
    {"FLASH_ATTENTION_INVARIANT", "on, off", "off",
     "on: calls that do not say otherwise have invariant bits (docs/numerics.md), or are refused by name"},
    {"FLASH_ATTENTION_TUNED", "on, off", "on", "off: the planner chooses by its rules alone, whatever was measured here"},
    {"FLASH_ATTENTION_QUALIFY", "0, 1, force", "1",
     "kernels that were never run on such a GPU: 0 does not use them, 1 tests them once at their first use, force tests "
     "them "
     "again"},
    {"FLASH_ATTENTION_RECORD", "a file", "none",
     "the problems of all calls are added to it, one a line, each once, for `flash-attention tune --problems`"},
    {"FLASH_ATTENTION_EMULATOR_SEED", "0 to 2^64 - 1", "0", "seed of the order in which the emulator runs threads"},
    {"FLASH_ATTENTION_CXX", "a command", "c++", "the compiler that builds kernels for the emulator"},
    {"FLASH_ATTENTION_CXX_FLAGS", "flags", "none", "more flags for it, e.g. -g -O0 for a debugger"},
};

[[noreturn]] void refuse(std::string_view variable, std::string_view value) {
  std::string allowed;
  for (const SettingDescription& description : descriptions) {
    if (description.variable == variable) allowed = description.allowed;
  }
  throw Error(ErrorCode::invalid_argument,
              std::string(variable) + ": '" + std::string(value) + "' is not allowed; allowed: " + allowed);
}

class Reader {
 public:
  explicit Reader(const Environment& environment) : environment_(environment) {}

  /// A variable that is set but empty counts as not set.
  std::string text(const char* variable, std::string fallback = {}) const {
    const char* value = environment_(variable);
    return value != nullptr && *value != '\0' ? std::string(value) : std::move(fallback);
  }

  std::filesystem::path path(const char* variable) const { return text(variable); }

  /// Empty if it is relative: code is loaded from below these folders, and anybody may write to the working folder.
  std::filesystem::path absolute_path(const char* variable) const {
    std::filesystem::path found = path(variable);
    return found.is_absolute() ? found : std::filesystem::path{};
  }

  std::uint64_t number(const char* variable, std::uint64_t fallback, std::uint64_t low, std::uint64_t high) const {
    const std::string value = text(variable);
    if (value.empty()) return fallback;
    std::uint64_t number = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
    if (error != std::errc() || end != value.data() + value.size() || number < low || number > high)
      refuse(variable, value);
    return number;
  }

  std::int64_t bytes(const char* variable, std::int64_t fallback) const {
    const std::string value = text(variable);
    if (value.empty()) return fallback;
    std::uint64_t number = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
    const std::string_view unit(end, value.data() + value.size());
    const int shift = unit.empty() ? 0 : unit == "K" ? 10 : unit == "M" ? 20 : unit == "G" ? 30 : -1;
    if (error != std::errc() || shift < 0 || number > (std::uint64_t{1} << 62 >> shift)) refuse(variable, value);
    return static_cast<std::int64_t>(number << shift);
  }

  bool on_or_off(const char* variable, bool fallback) const {
    const std::string value = text(variable);
    if (value.empty()) return fallback;
    if (value == "on" || value == "1") return true;
    if (value == "off" || value == "0") return false;
    refuse(variable, value);
  }

  std::optional<CpuIsa> isa(const char* variable) const {
    constexpr std::array<std::string_view, 6> names{"generic", "neon", "avx2", "avx512", "avx512_bf16", "amx"};
    const std::string value = text(variable);
    if (value.empty()) return std::nullopt;
    for (std::size_t i = 0; i < names.size(); ++i) {
      if (value == names[i]) return static_cast<CpuIsa>(i);
    }
    refuse(variable, value);
  }

  Qualify qualify(const char* variable) const {
    const std::string value = text(variable, "1");
    if (value == "0") return Qualify::never;
    if (value == "1") return Qualify::first_use;
    if (value == "force") return Qualify::always;
    refuse(variable, value);
  }

  ThreadSource thread_source(const char* variable) const {
    const std::string value = text(variable, "auto");
    if (value == "auto") return ThreadSource::automatic;
    if (value == "own") return ThreadSource::own;
    if (value == "openmp") return ThreadSource::openmp;
    refuse(variable, value);
  }

 private:
  const Environment& environment_;
};

std::filesystem::path default_cache_dir(const Reader& reader) {
  if (const auto xdg = reader.absolute_path("XDG_CACHE_HOME"); !xdg.empty()) return xdg / "flash_attention";
  if (const auto home = reader.absolute_path("HOME"); !home.empty()) return home / ".cache" / "flash_attention";
  return std::filesystem::path("/tmp") / ("flash_attention-" + std::to_string(::geteuid()));
}

}  // namespace

Settings read_settings(const Environment& environment) {
  const Reader reader(environment);
  Settings settings;
  settings.cache_dir = reader.path("FLASH_ATTENTION_CACHE_DIR");
  if (settings.cache_dir.empty()) settings.cache_dir = default_cache_dir(reader);
  settings.cache_limit_bytes = reader.bytes("FLASH_ATTENTION_CACHE_LIMIT", settings.cache_limit_bytes);
  settings.aot_dir = reader.path("FLASH_ATTENTION_AOT_DIR");
  settings.jit = reader.on_or_off("FLASH_ATTENTION_JIT", settings.jit);
  settings.nvrtc = reader.path("FLASH_ATTENTION_NVRTC");
  settings.nvrtc_options = reader.text("FLASH_ATTENTION_NVRTC_OPTIONS");
  settings.driver = reader.path("FLASH_ATTENTION_DRIVER");
  settings.kernel_dir = reader.path("FLASH_ATTENTION_KERNEL_DIR");
  settings.cpu_isa = reader.isa("FLASH_ATTENTION_CPU_ISA");
  settings.threads = static_cast<int>(reader.number("FLASH_ATTENTION_THREADS", 0, 1, 4096));
  settings.thread_source = reader.thread_source("FLASH_ATTENTION_THREAD_SOURCE");
  settings.check = reader.on_or_off("FLASH_ATTENTION_CHECK", settings.check);
  settings.invariant = reader.on_or_off("FLASH_ATTENTION_INVARIANT", settings.invariant);
  settings.tuned = reader.on_or_off("FLASH_ATTENTION_TUNED", settings.tuned);
  settings.qualify = reader.qualify("FLASH_ATTENTION_QUALIFY");
  settings.record = reader.path("FLASH_ATTENTION_RECORD");
  settings.emulator_seed = reader.number("FLASH_ATTENTION_EMULATOR_SEED", 0, 0, UINT64_MAX);
  settings.cxx = reader.text("FLASH_ATTENTION_CXX", settings.cxx);
  settings.cxx_flags = reader.text("FLASH_ATTENTION_CXX_FLAGS");
  settings.home = reader.absolute_path("HOME");
  settings.cuda_home = reader.absolute_path("CUDA_HOME");
  if (settings.cuda_home.empty()) settings.cuda_home = reader.absolute_path("CUDA_PATH");
  settings.conda_prefix = reader.absolute_path("CONDA_PREFIX");
  settings.virtual_env = reader.absolute_path("VIRTUAL_ENV");
  return settings;
}

namespace {
std::atomic<bool> in_use{false};
}

bool settings_in_use() { return in_use.load(std::memory_order_relaxed); }

const Settings& settings() {
  if (!settings_in_use()) in_use.store(true, std::memory_order_relaxed);
  // Never destroyed: a call may come from a destructor at the end of the process.
  static const Settings& process = *new Settings(read_settings([](const char* name) { return std::getenv(name); }));
  return process;
}

bool invariant_in_environment() noexcept {
  static const bool on = [] {
    const char* value = std::getenv("FLASH_ATTENTION_INVARIANT");
    return value != nullptr && (value == std::string_view("on") || value == std::string_view("1"));
  }();
  return on;
}

std::span<const SettingDescription> setting_descriptions() { return descriptions; }

}  // namespace flash_attention::support
