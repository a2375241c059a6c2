#include "cpu/peaks.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

#include "cpu/backend.h"
#include "cpu/isa/tables.h"
#include "cpu/thread_pool.h"

namespace flash_attention::cpu {
namespace {

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

/// The best of many short rounds, because other processes take the processor in between: work(thread) on all threads at
/// once, and what it amounts to, a second.
template <class Work>
double best_rate(ThreadPool& pool, double amount, Work work) {
  double best = 0;
  const double end = seconds() + 0.1;
  while (seconds() < end) {
    const double start = seconds();
    pool.run(
        pool.threads(), [](void* context, std::int64_t thread) { (*static_cast<Work*>(context))(thread); }, &work);
    best = std::max(best, amount / (seconds() - start));
  }
  return best;
}

}  // namespace

Peaks measure_peaks(int threads) {
  const DeviceInfo device = info();
  const KernelTable& table = kernel_table(device.isa);
  ThreadPool pool(threads);
  Peaks peaks;

  constexpr std::int64_t rounds = 2'000;
  const double flops = table.multiply_add(1) * rounds * threads;
  peaks.flops = best_rate(pool, flops, [&](std::int64_t) { table.multiply_add(rounds); });

  constexpr std::int64_t slice = 4 << 20;  // read in one round; the next round takes the next one
  const std::int64_t slices = std::max<std::int64_t>(4 * device.l2_bytes, 64 << 20) / slice;
  struct Buffer {
    std::vector<char> bytes;
    std::int64_t next = 0;
  };
  std::vector<Buffer> buffers(static_cast<std::size_t>(threads));
  for (Buffer& buffer : buffers) buffer.bytes.assign(static_cast<std::size_t>(slices * slice), 1);
  peaks.read_bytes = best_rate(pool, static_cast<double>(slice) * threads, [&](std::int64_t thread) {
    Buffer& buffer = buffers[static_cast<std::size_t>(thread)];
    table.read(buffer.bytes.data() + buffer.next++ % slices * slice, slice);
  });
  return peaks;
}

}  // namespace flash_attention::cpu
