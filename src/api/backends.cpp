#include "api/backends.h"

#include <array>

#include "api/checks/refuse.h"
#include "cpu/backend.h"
#include "cuda/backend.h"
#include "emulator/host/backend.h"

namespace flash_attention {
namespace api {
namespace {

constexpr std::array<const Backend*, 3> table_of_backends{&cpu::backend, &cuda::backend, &emulator::backend};

}  // namespace

std::span<const Backend* const> backends() { return table_of_backends; }

const Backend& backend_of(const Device& device) {
  const auto kind = static_cast<std::size_t>(device.kind);
  if (kind >= table_of_backends.size()) refuse("device.kind", std::to_string(kind), "allowed are cpu, cuda and emulator");
  return *table_of_backends[kind];
}

}  // namespace api

const DeviceTraits& device_traits(const Device& device) { return api::backend_of(device).traits; }
const DeviceTraits& device_traits(DeviceKind kind) { return device_traits(Device{.kind = kind}); }

std::string_view to_string(DeviceKind kind) {
  const auto index = static_cast<std::size_t>(kind);
  return index < api::backends().size() ? api::backends()[index]->name : "unknown device";
}

std::string to_string(Device device) {
  const auto index = static_cast<std::size_t>(device.kind);
  return index < api::backends().size() ? api::backends()[index]->describe(device) : "unknown device";
}

}  // namespace flash_attention
