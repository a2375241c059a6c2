#include "api/watchdog.h"

#include <atomic>

#include "check/check.h"
#include "cuda/memory.h"

namespace flash_attention::api {

void watch(const Prepared& prepared, const Buffers& buffers, const Options& options) {
  if (!prepared.problem.program.empty()) return;
  static std::atomic<std::uint64_t> calls{0};
  check::Fetch fetch = [](const void* from, std::size_t, std::vector<char>&) { return static_cast<const char*>(from); };
  if (options.device.kind == DeviceKind::cuda) {
    const int device = options.device.index;
    void* const stream = options.stream;
    if (cuda::is_captured(stream)) return;
    fetch = [device, stream](const void* from, std::size_t bytes, std::vector<char>& scratch) -> const char* {
      if (scratch.size() < bytes) scratch.resize(bytes);
      cuda::download(device, scratch.data(), from, bytes, stream);
      return scratch.data();
    };
  }
  check::check({prepared.problem, buffers, options, std::move(fetch)}, prepared.plan.pass, prepared.plan.kernel, calls++);
}

}  // namespace flash_attention::api
