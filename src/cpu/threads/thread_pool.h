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

/// Threads that share the indices of one loop at a time. Each begins with its own range, the same in every loop of the
/// same length, so that the data that it used before is still in its caches. Then it takes from the ranges of others.
/// The thread that calls run() takes indices, too, and at the end waits only for those that others have taken: it never
/// waits for a sleeping worker to wake up. A worker without work looks for more for 50 us and then sleeps. If it finds
/// that it did not have its processor to itself meanwhile, it sleeps at once the next times, because others need the
/// processor. Workers avoid the caller's processor: otherwise the system likes to wake them there, queued after the
/// caller.
class ThreadPool {
 public:
  static constexpr std::chrono::microseconds stays_awake{50};  // how long a worker without work stays awake

  explicit ThreadPool(int threads);  // including the caller; fewer if the system starts no more
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  /// Calls body(context, i) for each i in [0, count), on at most `threads` threads. While another thread's loop is
  /// running, the caller does all of it alone.
  void run(std::int64_t count, Body body, void* context, int threads);
  void run(std::int64_t count, Body body, void* context) { run(count, body, context, this->threads()); }

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

 private:
  /// The rest of a thread's range: the loop's number above the count of indices not taken. An index is only taken from
  /// the loop whose fields the thread has read, because a loop runs as long as a range has some left.
  struct alignas(64) Range {
    std::atomic<std::uint64_t> left{0};
  };

  void work(std::size_t self);
  bool take(std::size_t range, std::uint32_t loop, std::int64_t& index);
  void help(std::uint32_t loop, std::size_t self);
  std::int64_t range_end(std::size_t range, std::int64_t count) const;
  void keep_workers_off(int processor);

  // The running loop. Fields that workers poll, fields that the caller writes before, and fields that all write at the
  // end are on different cache lines. Otherwise each would take the lines from the others again and again.
  std::vector<Range> ranges_;                       // one for each thread; the caller's is the first
  alignas(64) std::atomic<std::uint32_t> loop_{0};  // sleeping workers wait on it
  alignas(64) std::atomic<Body> body_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::atomic<std::int64_t> count_{0};
  std::atomic<std::size_t> active_{1};  // threads that take part: they have the first ranges
  alignas(64) std::atomic<std::int64_t> done_{0};
  alignas(64) std::atomic<int> sleeping_{0};
  std::atomic<bool> stop_{false};
  std::mutex caller_;
  cpu_set_t allowed_;           // for workers, as it was when they were started
  int callers_processor_ = -1;  // the one that workers avoid
  std::vector<std::thread> workers_;
};

}  // namespace flash_attention::cpu
