#include <atomic>
#include <mutex>
#include <thread>

#include "emulator/checks/counting.h"
#include "emulator/checks/fault.h"
#include "emulator/host/module.h"
#include "flash_attention/error.h"
#include "support/settings.h"

namespace flash_attention::emulator {
namespace {

constexpr int max_stacks = 16384;

int default_workers() {
  const int asked = support::settings().threads;
  return asked > 0 ? asked : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace

void run_grid(const Module& module, const LaunchShape& shape, const void* argument, const RunOptions& options) {
  const std::int64_t blocks = std::int64_t{shape.grid.x} * shape.grid.y * shape.grid.z;
  if (blocks == 0) return;
  if (shape.block < 1 || shape.block > 1024 || shape.cluster < 1 || shape.cluster > 16 ||
      shape.grid.x % static_cast<unsigned>(shape.cluster) != 0 || shape.block_height < 1 ||
      shape.block % shape.block_height != 0) {
    throw Error(ErrorCode::device_failed, "kernel " + module.name + ": " + std::to_string(shape.block) +
                                              " threads a block and " + std::to_string(shape.cluster) +
                                              " blocks a cluster cannot be launched");
  }
  const std::int64_t clusters = blocks / shape.cluster;
  std::atomic<std::int64_t> next = 0;
  std::mutex mutex;
  std::string failure;
  const auto work = [&] {
    const FaultGuard guard;
    Scheduler scheduler(module.entry, shape, argument, options.seed);
    for (std::int64_t index; (index = next.fetch_add(1)) < clusters;) {
      const std::string wrong = scheduler.run_cluster(index);
      if (wrong.empty()) continue;
      next = clusters;
      const std::lock_guard lock(mutex);
      if (failure.empty()) failure = wrong;
    }
    add_counters(scheduler.counters());
  };
  // Each thread's stack takes two of the mappings that a process may have.
  const std::int64_t most = std::max(1, max_stacks / (shape.block * shape.cluster));
  const std::int64_t asked = std::min<std::int64_t>(most, options.workers > 0 ? options.workers : default_workers());
  std::vector<std::thread> threads;
  for (std::int64_t i = 1; i < std::min(asked, clusters); ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  if (!failure.empty()) {
    throw Error(ErrorCode::device_failed,
                "emulated kernel " + module.name + ", seed " + std::to_string(options.seed) + ": " + failure);
  }
}

}  // namespace flash_attention::emulator
