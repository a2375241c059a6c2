#include "api/micro_kernel.h"

#include "api/backends.h"
#include "flash_attention/error.h"

namespace flash_attention {

std::unique_ptr<Kernel> load_micro_kernel(const Plan& plan, const DeviceInfo& device) {
  const Backend& backend = api::backend_of(device.device);
  if (!backend.traits.emulated && device.arch == 90) return backend.load({}, plan, device, nullptr);
  throw Error(ErrorCode::unsupported,
              plan.kernel + " measures sm_90: got " + to_string(device.device) + ", allowed: a GPU of that architecture");
}

}  // namespace flash_attention
