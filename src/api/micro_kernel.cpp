#include "api/micro_kernel.h"

#include "cuda/backend.h"
#include "flash_attention/error.h"

namespace flash_attention {

std::unique_ptr<Kernel> load_micro_kernel(const Plan& plan, const DeviceInfo& device) {
  if (device.device.kind == DeviceKind::cuda && device.arch == 90) return cuda::load_kernel(plan, device);
  throw Error(ErrorCode::unsupported,
              plan.kernel + " measures sm_90: got " + to_string(device.device) + ", allowed: a GPU of that architecture");
}

}  // namespace flash_attention
