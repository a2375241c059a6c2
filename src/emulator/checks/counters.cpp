#include "emulator/checks/counters.h"

#include <atomic>
#include <mutex>

#include "emulator/checks/counting.h"

namespace flash_attention::emulator {
namespace {
std::mutex counters_mutex;
Counters total;
std::atomic<bool> counting = false;
}  // namespace

Counters& Counters::operator+=(const Counters& other) {
  blocks += other.blocks;
  threads += other.threads;
  shared_requests += other.shared_requests;
  shared_wavefronts += other.shared_wavefronts;
  shared_wavefronts_ideal += other.shared_wavefronts_ideal;
  global_requests += other.global_requests;
  global_sectors += other.global_sectors;
  bulk_bytes += other.bulk_bytes;
  mma_flops += other.mma_flops;
  wgmma_flops += other.wgmma_flops;
  tcgen05_flops += other.tcgen05_flops;
  fma_flops += other.fma_flops;
  barrier_waits += other.barrier_waits;
  mbarrier_waits += other.mbarrier_waits;
  return *this;
}

Counters counters() {
  const std::lock_guard lock(counters_mutex);
  return total;
}

void reset_counters() {
  const std::lock_guard lock(counters_mutex);
  total = {};
}

void add_counters(const Counters& counters) {
  const std::lock_guard lock(counters_mutex);
  total += counters;
}

bool count_accesses(bool on) { return counting.exchange(on); }
bool counting_accesses() { return counting.load(std::memory_order_relaxed); }

std::string to_string(const Counters& counters) {
  std::string text;
  const auto line = [&](const char* name, std::uint64_t value) {
    std::string label = name;
    label.resize(36, ' ');
    text += label + std::to_string(value) + "\n";
  };
  text += "accesses are those of ptx:: wrappers; plain ones are not seen\n";
  line("blocks", counters.blocks);
  line("threads", counters.threads);
  line("shared-memory warp instructions", counters.shared_requests);
  line("shared-memory wavefronts", counters.shared_wavefronts);
  line("  of them bank conflicts", counters.shared_wavefronts - counters.shared_wavefronts_ideal);
  line("global warp instructions", counters.global_requests);
  line("global sectors of 32 bytes", counters.global_sectors);
  line("bulk copies, bytes", counters.bulk_bytes);
  line("mma FLOPs", counters.mma_flops);
  line("wgmma FLOPs", counters.wgmma_flops);
  if (counters.tcgen05_flops != 0) line("tcgen05 FLOPs", counters.tcgen05_flops);
  line("fma FLOPs", counters.fma_flops);
  line("warps that came to a barrier", counters.barrier_waits);
  line("waits of threads at an mbarrier", counters.mbarrier_waits);
  return text;
}

}  // namespace flash_attention::emulator
