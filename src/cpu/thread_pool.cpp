#include "cpu/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>

namespace flash_attention::cpu {
namespace {

constexpr std::int64_t max_loop = std::int64_t{1} << 31;  // indices of one loop, so that they fit under its number

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

/// True until 50 us have passed since the first call.
class Patience {
 public:
  bool left() {
    pause();
    if (++looks_ % 64 != 0) return true;
    return std::chrono::steady_clock::now() - start_ < std::chrono::microseconds(50);
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  unsigned looks_ = 0;
};

}  // namespace

ThreadPool::ThreadPool(int threads) {
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
}

ThreadPool::~ThreadPool() {
  stop_ = true;
  ++loop_;
  loop_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

bool ThreadPool::take(std::uint32_t loop, std::int64_t& index) {
  std::uint64_t cursor = cursor_.load();
  while (static_cast<std::uint32_t>(cursor >> 32) == loop) {
    index = static_cast<std::int64_t>(cursor & 0xffffffffu);
    if (index >= count_.load()) return false;
    if (cursor_.compare_exchange_weak(cursor, cursor + 1)) return true;
  }
  return false;
}

void ThreadPool::help(std::uint32_t loop) {
  const Body body = body_.load();
  void* context = context_.load();
  const std::int64_t count = count_.load();
  std::int64_t index = 0;
  while (take(loop, index)) {
    body(context, index);
    if (done_.fetch_add(1) + 1 == count) done_.notify_all();
  }
}

void ThreadPool::keep_workers_off(int processor) {
  if (processor == callers_processor_) return;
  callers_processor_ = processor;
  cpu_set_t others;
  CPU_ZERO(&others);
  if (processor < 0 || sched_getaffinity(0, sizeof others, &others) != 0) return;
  CPU_CLR(static_cast<std::size_t>(processor), &others);
  if (CPU_COUNT(&others) == 0) return;
  for (std::thread& worker : workers_) pthread_setaffinity_np(worker.native_handle(), sizeof others, &others);
}

void ThreadPool::run(std::int64_t count, Body body, void* context) {
  const std::unique_lock<std::mutex> only(caller_, std::try_to_lock);
  if (!only.owns_lock() || workers_.empty() || count < 2) {
    for (std::int64_t i = 0; i < count; ++i) body(context, i);
    return;
  }
  struct Part {
    Body body;
    void* context;
    std::int64_t first;
  };
  for (std::int64_t first = 0; first < count; first += max_loop) {
    Part part{body, context, first};
    const std::int64_t indices = std::min(count - first, max_loop);
    body_ = [](void* p, std::int64_t i) {
      const Part& one = *static_cast<const Part*>(p);
      one.body(one.context, one.first + i);
    };
    context_ = &part;
    count_ = indices;
    done_ = 0;
    const std::uint32_t loop = loop_.load() + 1;
    cursor_ = std::uint64_t{loop} << 32;
    loop_ = loop;
    if (sleeping_.load() > 0) {
      keep_workers_off(sched_getcpu());
      loop_.notify_all();
    }
    help(loop);
    Patience patience;
    for (std::int64_t done = done_.load(); done < indices; done = done_.load()) {
      if (!patience.left()) done_.wait(done);
    }
  }
}

void ThreadPool::work() {
  for (std::uint32_t seen = 0; !stop_.load();) {
    Patience patience;
    while (loop_.load() == seen && patience.left()) {
    }
    ++sleeping_;
    loop_.wait(seen);
    --sleeping_;
    seen = loop_.load();
    help(seen);
  }
}

}  // namespace flash_attention::cpu
