#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace flash_attention::cpu {

using Body = void (*)(void* context, std::int64_t index);

/// Threads that take the indices of one loop at a time. The thread that calls run() takes indices too and at the end waits
/// only for those that others have taken: it never waits for a sleeping worker to wake up. A worker that has run out of
/// work looks for more for 50 us and then sleeps. Workers keep off the processor that the caller runs on: left alone, the
/// system likes to wake them there, behind the caller.
class ThreadPool {
 public:
  explicit ThreadPool(int threads);  // the caller counts as one
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  /// body(context, i) for each i in [0, count). While another thread's loop is running, the caller does it all alone.
  void run(std::int64_t count, Body body, void* context);

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

 private:
  void work();
  bool take(std::uint32_t loop, std::int64_t& index);
  void help(std::uint32_t loop);
  void keep_workers_off(int processor);

  // The loop under way. cursor_ holds its number above the next index: an index is taken only from the loop whose fields
  // the worker has read, because publishing the next loop changes the number.
  std::atomic<std::uint64_t> cursor_{0};
  std::atomic<std::uint32_t> loop_{0};  // what sleeping workers wait on
  std::atomic<Body> body_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::atomic<std::int64_t> count_{0};
  std::atomic<std::int64_t> done_{0};
  std::atomic<int> sleeping_{0};
  std::atomic<bool> stop_{false};
  std::mutex caller_;
  int callers_processor_ = -1;  // the one that workers keep off
  std::vector<std::thread> workers_;
};

}  // namespace flash_attention::cpu
