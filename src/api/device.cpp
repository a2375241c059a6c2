#include "flash_attention/device.h"

#include <charconv>

#include "api/backends.h"
#include "api/checks/refuse.h"
#include "api/guard.h"
#include "plan/gpu_facts.h"
#include "support/settings.h"
#include "tuning/store.h"

namespace flash_attention {

DeviceInfo device_info(Device device) {
  return api::guarded([&] {
    const Backend& backend = api::backend_of(device);
    DeviceInfo info = backend.info(device);
    info.proven_only = support::settings().qualify == support::Qualify::never && !backend.traits.emulated;
    info.tuned = tuning::known_to_planner(info, backend.driver != nullptr ? backend.driver() : std::string());
    return info;
  });
}

std::vector<DeviceInfo> devices() {
  return api::guarded([] {
    std::vector<DeviceInfo> all;
    for (const Backend* backend : api::backends()) {
      if (backend->devices == nullptr) continue;
      for (DeviceInfo& device : backend->devices()) all.push_back(std::move(device));
    }
    return all;
  });
}

Device best_device() {
  return api::guarded([] {
    for (const Backend* backend : api::backends()) {
      if (!backend->traits.gpu_kernels || backend->devices == nullptr) continue;
      if (const std::vector<DeviceInfo> gpus = backend->devices(); !gpus.empty()) return gpus.front().device;
    }
    return Device{};
  });
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
  if (number_after("emulator:sm_", number) && plan::is_emulated(number)) {
    return {.kind = DeviceKind::emulator, .emulated_arch = number};
  }
  api::refuse("device", "'" + std::string(text) + "'",
              "allowed are cpu, cuda, cuda:N, emulator, and emulator:sm_N with N of " + plan::emulated_archs());
}

}  // namespace flash_attention
