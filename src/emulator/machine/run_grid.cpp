#include <algorithm>
#include <atomic>
#include <iterator>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

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

/// In ascending order, each once.
std::vector<std::int64_t> clusters_to_record(const RecordRequest& request, std::int64_t clusters) {
  if (request.only >= 0) {
    return request.only < clusters ? std::vector<std::int64_t>{request.only} : std::vector<std::int64_t>{};
  }
  std::vector<std::int64_t> chosen;
  const std::int64_t count = std::min<std::int64_t>(request.clusters, clusters);
  for (std::int64_t i = 0; i < count; ++i) chosen.push_back((2 * i + 1) * clusters / (2 * count));
  return chosen;
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
  const std::optional<RecordRequest> request = recording();
  const std::vector<std::int64_t> recorded = request ? clusters_to_record(*request, clusters) : std::vector<std::int64_t>{};
  const bool alone = request && request->alone;
  const auto to_run = alone ? static_cast<std::int64_t>(recorded.size()) : clusters;
  std::vector<std::vector<BlockRecord>> records(recorded.size());
  std::atomic<std::int64_t> next = 0;
  std::mutex mutex;
  std::string failure;
  const auto work = [&] {
    const FaultGuard guard;
    Scheduler scheduler(module.entry, shape, argument, options.seed);
    for (std::int64_t turn; (turn = next.fetch_add(1)) < to_run;) {
      const std::int64_t index = alone ? recorded[static_cast<std::size_t>(turn)] : turn;
      const auto found = std::lower_bound(recorded.begin(), recorded.end(), index);
      const bool writes = found != recorded.end() && *found == index;
      const std::string wrong =
          scheduler.run_cluster(index, writes ? &records[static_cast<std::size_t>(found - recorded.begin())] : nullptr);
      if (wrong.empty()) continue;
      next = to_run;
      const std::lock_guard lock(mutex);
      if (failure.empty()) failure = wrong;
    }
    add_counters(scheduler.counters());
  };
  // Each thread's stack takes two of the mappings that a process may have.
  const std::int64_t most = std::max(1, max_stacks / (shape.block * shape.cluster));
  const std::int64_t asked = std::min<std::int64_t>(most, options.workers > 0 ? options.workers : default_workers());
  std::vector<std::thread> threads;
  for (std::int64_t i = 1; i < std::min(asked, to_run); ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  if (!failure.empty()) {
    throw Error(ErrorCode::device_failed,
                "emulated kernel " + module.name + ", seed " + std::to_string(options.seed) + ": " + failure);
  }
  if (!request) return;
  LaunchRecord record{.unit = options.unit,
                      .entry = module.name,
                      .grid = {shape.grid.x, shape.grid.y, shape.grid.z},
                      .threads = shape.block,
                      .cluster = shape.cluster,
                      .shared_bytes = shape.shared_bytes,
                      .blocks_per_sm = shape.blocks_per_sm,
                      .clusters = recorded,
                      .blocks = {}};
  for (std::vector<BlockRecord>& cluster : records)
    std::move(cluster.begin(), cluster.end(), std::back_inserter(record.blocks));
  keep_record(std::move(record));
}

}  // namespace flash_attention::emulator
