#include "cuda/backend.h"

#include "cuda/memory.h"

namespace flash_attention::cuda {

constinit const Backend backend{
    .kind = DeviceKind::cuda,
    .name = "cuda",
    .traits = {.host_memory = false, .streams = true, .gpu_kernels = true},
    .vector_bytes = 16,
    .info = [](const Device& device) { return info(device.index); },
    .describe = [](const Device& device) { return "cuda:" + std::to_string(device.index); },
    .devices = devices,
    .diagnose = diagnose,
    .load = [](const Problem&, const Plan& plan, const DeviceInfo& device,
               void* stream) { return load_kernel(plan, device, stream); },
    .load_launch = load_launch,
    .load_plain = load_plain_kernel,
    .download = [](const Device& device, void* to, const void* from, std::size_t bytes,
                   void* stream) { download(device.index, to, from, bytes, stream); },
    .is_captured = is_captured,
};

}  // namespace flash_attention::cuda
