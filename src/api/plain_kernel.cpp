#include "api/plain_kernel.h"

#include "api/backends.h"
#include "flash_attention/error.h"
#include "jit/sources.h"
#include "support/settings.h"

namespace flash_attention {

std::unique_ptr<PlainKernel> load_plain_kernel(const std::string& unit, const std::string& entry,
                                               const DeviceInfo& device) {
  const Backend& backend = api::backend_of(device.device);
  if (backend.load_plain != nullptr) return backend.load_plain(unit, entry, device);
  throw Error(ErrorCode::unsupported,
              "kernel " + unit + " is for a GPU: got device " + std::string(backend.name) + ", allowed: cuda, emulator");
}

std::unique_ptr<Kernel> load_micro_kernel(const Plan& plan, const DeviceInfo& device) {
  const Backend& backend = api::backend_of(device.device);
  if (!backend.traits.emulated && device.arch == 90) return backend.load({}, plan, device, nullptr);
  throw Error(ErrorCode::unsupported,
              plan.kernel + " measures sm_90: got " + to_string(device.device) + ", allowed: a GPU of that architecture");
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
