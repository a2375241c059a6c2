#include "cpu/peaks.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

#include "cpu/backend.h"
#include "cpu/isa/tables.h"
#include "cpu/threads/parallel.h"

namespace flash_attention::cpu {
namespace {

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

/// Runs work(thread) on all threads, each beginning when all have started, and returns `amount` a second. It is the
/// best of several rounds, because other processes use the processor, too.
template <class Work>
double best_rate(ThreadPool& pool, double amount, Work work) {
  struct Round {
    Work& work;
    int threads;
    std::atomic<int> there{0};
    double start = 0;  // the start of the last thread
  };
  double best = 0;
  const double end = seconds() + 0.1;
  for (int round = 0; round < 3 || seconds() < end; ++round) {
    Round all{work, pool.threads()};
    pool.run(
        pool.threads(),
        [](void* context, std::int64_t thread) {
          Round& mine = *static_cast<Round*>(context);
          if (mine.there.fetch_add(1) + 1 == mine.threads) mine.start = seconds(), mine.there = 2 * mine.threads;
          while (mine.there.load() < 2 * mine.threads) {
          }
          mine.work(thread);
        },
        &all);
    best = std::max(best, amount / (seconds() - all.start));
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

  // Each thread reads all of its buffer in a round. It is so large that the caches keep nearly nothing of it.
  const std::int64_t bytes = std::max<std::int64_t>(4 * device.l2_bytes, 64 << 20) / 4096 * 4096;
  const std::vector<std::vector<char>> buffers(static_cast<std::size_t>(threads),
                                               std::vector<char>(static_cast<std::size_t>(bytes), 1));
  peaks.read_bytes = best_rate(pool, static_cast<double>(bytes) * threads, [&](std::int64_t thread) {
    table.read(buffers[static_cast<std::size_t>(thread)].data(), bytes);
  });
  return peaks;
}

double read_seconds(const void* from, std::int64_t bytes) {
  static constexpr std::int64_t piece = 1 << 20;
  struct Read {
    const KernelTable& table;
    const char* from;
    std::int64_t bytes;
  } read{kernel_table(info().isa), static_cast<const char*>(from), bytes};
  const double start = seconds();
  parallel_for((bytes + piece - 1) / piece, false,
               [](void* context, std::int64_t i) {
                 const Read& all = *static_cast<const Read*>(context);
                 all.table.read(all.from + i * piece, std::min(piece, all.bytes - i * piece));
               },
               &read);
  return seconds() - start;
}

}  // namespace flash_attention::cpu
