#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace flash_attention::cpu {

using Body = void (*)(void* context, std::int64_t index);

/// Threads that take the indices of one loop at a time. Each begins with a separate range, the same in every loop of the
/// same length, so that what it touched before is still in its caches; then it takes from the others' ranges. The thread
/// that calls run() takes indices too and at the end waits only for those that others have taken: it never waits for a
/// sleeping worker to wake up. A worker that has run out of work looks for more for 50 us and then sleeps; where it finds
/// that it did not have its processor to itself meanwhile, it sleeps at once the next times, because others need it.
/// Workers keep off the processor that the caller runs on: left alone, the system likes to wake them there, behind the
/// caller.
class ThreadPool {
 public:
  static constexpr std::chrono::microseconds stays_awake{50};  // for which a worker without work stays awake

  explicit ThreadPool(int threads);  // the caller counts as one; fewer where the system starts no more
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  /// body(context, i) for each i in [0, count), on at most so many threads. While another thread's loop is running, the
  /// caller does it all alone.
  void run(std::int64_t count, Body body, void* context, int threads);
  void run(std::int64_t count, Body body, void* context) { run(count, body, context, this->threads()); }

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

 private:
  /// What is left of a thread's range: the loop's number above the count of indices not taken. An index is taken only from
  /// the loop whose fields the thread has read, because as long as a range has some left, its loop is under way.
  struct alignas(64) Range {
    std::atomic<std::uint64_t> left{0};
  };

  void work(std::size_t self);
  bool take(std::size_t range, std::uint32_t loop, std::int64_t& index);
  void help(std::uint32_t loop, std::size_t self);
  std::int64_t range_end(std::size_t range, std::int64_t count) const;
  void keep_workers_off(int processor);

  // The loop under way. What workers look at while they wait, what the caller writes before, and what all write at the
  // end are on different cache lines, or each would take them from the others again and again.
  std::vector<Range> ranges_;                       // one a thread; the caller's is the first
  alignas(64) std::atomic<std::uint32_t> loop_{0};  // what sleeping workers wait on
  alignas(64) std::atomic<Body> body_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::atomic<std::int64_t> count_{0};
  std::atomic<std::size_t> active_{1};  // threads that take part: the first ranges are theirs
  alignas(64) std::atomic<std::int64_t> done_{0};
  alignas(64) std::atomic<int> sleeping_{0};
  std::atomic<bool> stop_{false};
  std::mutex caller_;
  cpu_set_t allowed_;           // for workers, as it was when they were started
  int callers_processor_ = -1;  // the one that workers keep off
  std::vector<std::thread> workers_;
};

}  // namespace flash_attention::cpu
