#include "api/plain_kernel.h"

#include "cuda/backend.h"
#include "emulator/host/backend.h"
#include "flash_attention/error.h"
#include "jit/sources.h"
#include "support/settings.h"

namespace flash_attention {

std::unique_ptr<PlainKernel> load_plain_kernel(const std::string& unit, const std::string& entry,
                                               const DeviceInfo& device) {
  switch (device.device.kind) {
    case DeviceKind::cuda:
      return cuda::load_plain_kernel(unit, entry, device);
    case DeviceKind::emulator:
      return emulator::load_plain_kernel(unit, entry, device);
    case DeviceKind::cpu:
      break;
  }
  throw Error(ErrorCode::unsupported, "kernel " + unit + " is for a GPU: got device cpu, allowed: cuda, emulator");
}

std::string plain_kernel_source(const std::string& unit) {
  const auto& folder = support::settings().kernel_dir;
  const std::string file = jit::file_of_unit(unit, folder);
  for (const jit::SourceFile& source : jit::sources_of(file, folder)) {
    if (source.name == file) return source.text;
  }
  throw Error(ErrorCode::internal, "kernel source " + file + " is not among its own sources");
}

}  // namespace flash_attention
