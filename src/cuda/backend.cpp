#include "cuda/backend.h"

#include <algorithm>

#include "cuda/driver.h"
#include "cuda/memory.h"

namespace flash_attention::cuda {
namespace {

/// First fills more than the L2 cache, so that every sample begins with data in memory, and so that the GPU is busy
/// until the work and the second mark are queued.
class StreamClock final : public Clock {
 public:
  explicit StreamClock(const DeviceInfo& info)
      : flush_(info.device.index, static_cast<std::size_t>(std::max<std::int64_t>(2 * info.l2_bytes, 64 << 20))),
        watch_(info.device.index) {}

  double seconds(void* stream, const std::function<void()>& queue_work) override {
    flush_.fill(0, stream);
    watch_.start(stream);
    queue_work();
    watch_.stop(stream);
    return static_cast<double>(watch_.milliseconds()) * 1e-3;
  }

 private:
  DeviceMemory flush_;
  Stopwatch watch_;
};

std::shared_ptr<void> allocate(const Device& device, std::size_t bytes) {
  const auto memory = std::make_shared<DeviceMemory>(device.index, bytes);
  return {memory, memory->data()};
}

}  // namespace

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
    .driver = [] { return std::to_string(driver().version); },
    .allocate = allocate,
    .upload = [](const Device& device, void* to, const void* from,
                 std::size_t bytes) { upload(device.index, to, from, bytes); },
    .clock = [](const DeviceInfo& device) -> std::unique_ptr<Clock> { return std::make_unique<StreamClock>(device); },
    .download = [](const Device& device, void* to, const void* from, std::size_t bytes,
                   void* stream) { download(device.index, to, from, bytes, stream); },
    .is_captured = is_captured,
};

}  // namespace flash_attention::cuda
