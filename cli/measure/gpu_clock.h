#pragma once

#include <algorithm>

#include "cuda/memory.h"
#include "flash_attention/device.h"

namespace flash_attention::cli {

/// Times work as the GPU sees it. Writing more than the L2 cache first makes every sample start from DRAM, and keeps the
/// GPU busy until the work and the end mark are queued, so that the host's launch cost is not measured.
class GpuClock {
 public:
  explicit GpuClock(const DeviceInfo& info)
      : flush_(info.device.index, static_cast<std::size_t>(std::max<std::int64_t>(2 * info.l2_bytes, 64 << 20))),
        watch_(info.device.index) {}

  template <typename Work>
  double seconds(void* stream, const Work& queue_work) {
    flush_.fill(0, stream);
    watch_.start(stream);
    queue_work();
    watch_.stop(stream);
    return static_cast<double>(watch_.milliseconds()) * 1e-3;
  }

 private:
  cuda::DeviceMemory flush_;
  cuda::Stopwatch watch_;
};

}  // namespace flash_attention::cli
