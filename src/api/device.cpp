#include "flash_attention/device.h"

#include <charconv>

#include "api/checks/refuse.h"
#include "api/guard.h"
#include "cpu/backend.h"
#include "cuda/backend.h"
#include "emulator/host/backend.h"

namespace flash_attention {
namespace {

DeviceInfo facts_of(Device device) {
  switch (device.kind) {
    case DeviceKind::cpu:
      api::require(device.index == 0, "device.index", std::int64_t{device.index}, "there is one CPU, cpu:0");
      return cpu::info();
    case DeviceKind::cuda:
      return cuda::info(device.index);
    case DeviceKind::emulator:
      api::require(device.emulated_arch == 0 || device.emulated_arch == 80 || device.emulated_arch == 90,
                   "device.emulated_arch", std::int64_t{device.emulated_arch}, "allowed are 80 and 90");
      return emulator::info(device.emulated_arch == 0 ? 90 : device.emulated_arch);
  }
  api::refuse("device.kind", std::to_string(static_cast<int>(device.kind)), "allowed are cpu, cuda and emulator");
}

}  // namespace

DeviceInfo device_info(Device device) {
  return api::guarded([&] { return facts_of(device); });
}

std::vector<DeviceInfo> devices() {
  return api::guarded([] {
    std::vector<DeviceInfo> all{cpu::info()};
    for (DeviceInfo& gpu : cuda::devices()) all.push_back(std::move(gpu));
    return all;
  });
}

Device best_device() {
  return api::guarded([] {
    const std::vector<DeviceInfo> gpus = cuda::devices();
    return gpus.empty() ? Device{} : gpus.front().device;
  });
}

std::string_view to_string(DeviceKind kind) {
  switch (kind) {
    case DeviceKind::cpu:
      return "cpu";
    case DeviceKind::cuda:
      return "cuda";
    case DeviceKind::emulator:
      return "emulator";
  }
  return "unknown device";
}

std::string_view to_string(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::generic:
      return "generic";
    case CpuIsa::neon:
      return "neon";
    case CpuIsa::avx2:
      return "avx2";
    case CpuIsa::avx512:
      return "avx512";
    case CpuIsa::avx512_bf16:
      return "avx512_bf16";
    case CpuIsa::amx:
      return "amx";
  }
  return "unknown isa";
}

std::string to_string(Device device) {
  switch (device.kind) {
    case DeviceKind::cpu:
      return "cpu";
    case DeviceKind::cuda:
      return "cuda:" + std::to_string(device.index);
    case DeviceKind::emulator:
      return "emulator:sm_" + std::to_string(device.emulated_arch == 0 ? 90 : device.emulated_arch);
  }
  return "unknown device";
}

Device parse_device(std::string_view text) {
  const auto number_after = [&](std::string_view prefix, int& value) {
    if (!text.starts_with(prefix)) return false;
    const char* first = text.data() + prefix.size();
    const char* last = text.data() + text.size();
    const auto [end, error] = std::from_chars(first, last, value);
    return error == std::errc{} && end == last && value >= 0;
  };
  int number = 0;
  if (text == "cpu") return {};
  if (text == "cuda") return {.kind = DeviceKind::cuda};
  if (text == "emulator") return {.kind = DeviceKind::emulator, .emulated_arch = 90};
  if (number_after("cuda:", number)) return {.kind = DeviceKind::cuda, .index = number};
  if (number_after("emulator:sm_", number) && (number == 80 || number == 90)) {
    return {.kind = DeviceKind::emulator, .emulated_arch = number};
  }
  api::refuse("device", "'" + std::string(text) + "'",
              "allowed are cpu, cuda, cuda:N, emulator, emulator:sm_80 and emulator:sm_90");
}

}  // namespace flash_attention
