#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "flash_attention/export.h"
#include "flash_attention/standard.h"

namespace flash_attention {

namespace plan {
class Tuned;
}

enum class DeviceKind : std::uint8_t {
  cpu,
  cuda,
  emulator,  ///< runs the CUDA kernels on the CPU: slow, exact, for tests and learning
};

struct Device {
  DeviceKind kind = DeviceKind::cpu;
  int index = 0;          ///< which GPU; 0 elsewhere
  int emulated_arch = 0;  ///< emulator only: the architecture that it emulates, 80, 89, 90, 100 or 120 (0 = 90)

  friend bool operator==(const Device&, const Device&) = default;
};

/// Traits of all devices of a kind. Code reads these, not the kind.
struct DeviceTraits {
  bool host_memory = false;  ///< tensors are in the host's memory, and a call is done when it returns
  bool streams = false;      ///< calls are queued on a stream, and events on it measure them
  bool gpu_kernels = false;  ///< runs the kernels of kernels/, which are compiled at their first use
  bool emulated = false;     ///< emulates another device: its work can be counted, its times mean nothing
};

/// Instruction sets of the CPU backend, from the plainest to the most capable.
enum class CpuIsa : std::uint8_t { generic, neon, avx2, avx512, avx512_bf16, amx };

/// Facts about a device, read once and passed as a value. The planner decides from these only.
struct DeviceInfo {
  Device device{};
  std::string name{};
  int arch = 0;                       ///< CUDA and emulator: compute capability, 90 for 9.0
  int num_sms = 0;                    ///< CUDA and emulator
  std::int64_t shared_bytes = 0;      ///< CUDA and emulator: shared memory that one block may use
  std::int64_t l2_bytes = 0;          ///< last-level cache
  std::int64_t memory_bytes = 0;      ///< total memory of the device
  CpuIsa isa = CpuIsa::generic;       ///< CPU
  int threads = 1;                    ///< CPU: workers, the caller included
  std::int64_t core_cache_bytes = 0;  ///< CPU: level-2 cache of one core; 0 if unknown
  std::shared_ptr<const plan::Tuned> tuned{};  ///< what was measured on it (tune.h); null: nothing

  bool proven_only = false;  ///< GPU: use only kernels that have run on such a GPU before, or pass their self-test

  friend bool operator==(const DeviceInfo&, const DeviceInfo&) = default;
};

/// Throws Error(invalid_argument) for a number that is not a kind.
FLASH_ATTENTION_API const DeviceTraits& device_traits(DeviceKind kind);
FLASH_ATTENTION_API const DeviceTraits& device_traits(const Device& device);

/// Facts about one device. Throws Error(unavailable) if it does not exist.
FLASH_ATTENTION_API DeviceInfo device_info(Device device);

/// Facts about a typical GPU of an architecture (90 for 9.0). No such GPU is needed: use it for plans and for kernels
/// compiled ahead of time. Throws Error(invalid_argument) for an architecture that the library does not know.
FLASH_ATTENTION_API DeviceInfo typical_gpu(int arch);

/// Every device this process can use: the CPU first, then the GPUs. The emulator is not listed.
FLASH_ATTENTION_API std::vector<DeviceInfo> devices();

/// The fastest device here: the first GPU if a compiler is installed, otherwise the CPU.
FLASH_ATTENTION_API Device best_device();

FLASH_ATTENTION_API std::string_view to_string(DeviceKind kind);
FLASH_ATTENTION_API std::string_view to_string(CpuIsa isa);
FLASH_ATTENTION_API std::string to_string(Device device);  ///< "cpu", "cuda:0", "emulator:sm_90"

/// The inverse of to_string; also takes "cuda" and "emulator". Throws Error(invalid_argument).
FLASH_ATTENTION_API Device parse_device(std::string_view text);

}  // namespace flash_attention
