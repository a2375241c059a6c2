#include "cpu/parallel.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>

#include "cpu/detect.h"
#include "flash_attention/runtime.h"
#include "support/settings.h"

namespace flash_attention::cpu {
namespace {

int pool_threads() {
  const int wanted = support::settings().threads;
  return wanted > 0 ? wanted : usable_processors();
}

std::mutex making;
std::atomic<ThreadPool*> the_pool{nullptr};

/// The pool is never destroyed: its threads may sleep at the end of the process. A child of fork() has none of them, so it
/// forgets the pool and makes its own when it needs one.
ThreadPool& pool() {
  if (ThreadPool* made = the_pool.load()) return *made;
  const std::lock_guard lock(making);
  if (ThreadPool* made = the_pool.load()) return *made;
  static const int registered = pthread_atfork([] { making.lock(); }, [] { making.unlock(); },
                                               [] {
                                                 the_pool = nullptr;
                                                 making.unlock();
                                               });
  (void)registered;
  the_pool = new ThreadPool(pool_threads());
  return *the_pool;
}

struct Hook {
  ParallelFor function = nullptr;
  void* context = nullptr;
  int threads = 1;
};

std::mutex hook_mutex;
Hook hook;

Hook current_hook() {
  const std::lock_guard lock(hook_mutex);
  return hook;
}

thread_local bool inside = false;

using Clock = std::chrono::steady_clock;
thread_local Clock::time_point last_end;  // of a call that was timed

/// A loop whose bodies may throw: threads other than the caller's must not.
struct Guarded {
  Body body;
  void* context;
  std::mutex mutex;
  std::exception_ptr error;

  static void call(void* self, std::int64_t index) {
    Guarded& guarded = *static_cast<Guarded*>(self);
    const bool outer = inside;
    inside = true;
    try {
      guarded.body(guarded.context, index);
    } catch (...) {
      const std::lock_guard lock(guarded.mutex);
      if (!guarded.error) guarded.error = std::current_exception();
    }
    inside = outer;
  }
};

}  // namespace

int num_threads() {
  const Hook mine = current_hook();
  static const int own = pool_threads();
  return mine.function != nullptr ? mine.threads : own;
}

Sharing::Sharing(double multiplications) : timed_(multiplications >= 1e5), worth_it_(multiplications >= 1e6) {
  if (timed_ && Clock::now() - last_end < ThreadPool::stays_awake) worth_it_ = true;
}

Sharing::~Sharing() {
  if (timed_) last_end = Clock::now();
}

void parallel_for(std::int64_t count, bool serial, Body body, void* context) {
  if (serial || inside || count < 2) {
    for (std::int64_t i = 0; i < count; ++i) body(context, i);
    return;
  }
  Guarded guarded{body, context, {}, {}};
  if (const Hook mine = current_hook(); mine.function != nullptr) {
    mine.function(mine.context, count, Guarded::call, &guarded);
  } else {
    pool().run(count, Guarded::call, &guarded);
  }
  if (guarded.error) std::rethrow_exception(guarded.error);
}

}  // namespace flash_attention::cpu

namespace flash_attention {

void set_parallel_for(ParallelFor parallel_for, void* context, int threads) {
  const std::lock_guard lock(cpu::hook_mutex);
  cpu::hook = {parallel_for, context, std::max(threads, 1)};
}

}  // namespace flash_attention
