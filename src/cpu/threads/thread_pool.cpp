#include "cpu/threads/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <system_error>

namespace flash_attention::cpu {
namespace {

constexpr std::int64_t max_loop = std::int64_t{1} << 31;  // indices of one loop, so that they fit below its number

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

/// The processor time that this thread has used.
std::chrono::nanoseconds own_time() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

/// True until the time that a worker stays awake has passed since the first call.
class Patience {
 public:
  bool left() {
    pause();
    if (++looks_ % 64 != 0) return true;
    return std::chrono::steady_clock::now() - start_ < ThreadPool::stays_awake;
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  unsigned looks_ = 0;
};

}  // namespace

ThreadPool::ThreadPool(int threads) : ranges_(static_cast<std::size_t>(std::max(threads, 1))) {
  CPU_ZERO(&allowed_);
  sched_getaffinity(0, sizeof allowed_, &allowed_);
  try {
    for (std::size_t i = 1; i < ranges_.size(); ++i) workers_.emplace_back([this, i] { work(i); });
  } catch (const std::system_error&) {  // a limit on threads or memory: the threads that did start must be enough
  }
}

ThreadPool::~ThreadPool() {
  stop_ = true;
  ++loop_;
  loop_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

std::int64_t ThreadPool::range_end(std::size_t range, std::int64_t count) const {
  return count * static_cast<std::int64_t>(range + 1) / static_cast<std::int64_t>(active_.load());
}

bool ThreadPool::take(std::size_t range, std::uint32_t loop, std::int64_t& index) {
  std::atomic<std::uint64_t>& left = ranges_[range].left;
  std::uint64_t state = left.load();
  while (static_cast<std::uint32_t>(state >> 32) == loop && (state & 0xffffffffu) != 0) {
    if (!left.compare_exchange_weak(state, state - 1)) continue;
    index = range_end(range, count_.load()) - static_cast<std::int64_t>(state & 0xffffffffu);
    return true;
  }
  return false;
}

void ThreadPool::help(std::uint32_t loop, std::size_t self) {
  std::int64_t index = 0, count = 0, finished = 0;
  const std::size_t active = active_.load();
  if (self >= active) return;
  for (std::size_t i = 0; i < active; ++i) {
    for (; take((self + i) % active, loop, index); ++finished) {
      count = count_.load();
      body_.load()(context_.load(), index);
    }
  }
  if (finished > 0 && done_.fetch_add(finished) + finished == count) done_.notify_all();
}

void ThreadPool::keep_workers_off(int processor) {
  if (processor == callers_processor_) return;
  callers_processor_ = processor;
  cpu_set_t others = allowed_;  // not the caller's mask, which may be pinned to some of them
  if (processor >= 0) CPU_CLR(static_cast<std::size_t>(processor), &others);
  if (CPU_COUNT(&others) < static_cast<int>(workers_.size())) others = allowed_;
  if (CPU_COUNT(&others) == 0) return;
  for (std::thread& worker : workers_) pthread_setaffinity_np(worker.native_handle(), sizeof others, &others);
}

void ThreadPool::run(std::int64_t count, Body body, void* context, int threads) {
  const std::unique_lock<std::mutex> only(caller_, std::try_to_lock);
  if (!only.owns_lock() || workers_.empty() || count < 2 || threads < 2) {
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
    active_ = std::min(static_cast<std::size_t>(threads), workers_.size() + 1);
    done_ = 0;
    const std::uint32_t loop = loop_.load() + 1;
    for (std::size_t range = 0; range < active_.load(); ++range) {
      const std::int64_t begin = range == 0 ? 0 : range_end(range - 1, indices);
      ranges_[range].left = (std::uint64_t{loop} << 32) | static_cast<std::uint64_t>(range_end(range, indices) - begin);
    }
    loop_ = loop;
    if (sleeping_.load() > 0) {
      keep_workers_off(sched_getcpu());
      loop_.notify_all();
    }
    help(loop, 0);
    Patience patience;
    for (std::int64_t done = done_.load(); done < indices; done = done_.load()) {
      if (!patience.left()) done_.wait(done);
    }
  }
}

void ThreadPool::work(std::size_t self) {
  constexpr int give_way = 64;  // how often a worker sleeps at once after it found other processes on its processor
  int sleeps_at_once = 0;
  for (std::uint32_t seen = 0; !stop_.load();) {
    if (sleeps_at_once > 0) {
      --sleeps_at_once;
    } else if (loop_.load() == seen) {
      const std::chrono::nanoseconds before = own_time();
      Patience patience;
      while (loop_.load() == seen && patience.left()) {
      }
      if (loop_.load() == seen && own_time() - before < stays_awake / 2) sleeps_at_once = give_way;
    }
    if (loop_.load() == seen) {
      ++sleeping_;
      loop_.wait(seen);
      --sleeping_;
    }
    seen = loop_.load();
    help(seen, self);
  }
}

}  // namespace flash_attention::cpu
