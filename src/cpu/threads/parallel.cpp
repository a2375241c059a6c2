#include "cpu/threads/parallel.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>
#include <new>

#include "cpu/detect.h"
#include "cpu/threads/contention.h"
#include "cpu/threads/openmp.h"
#include "flash_attention/runtime.h"
#include "support/settings.h"

namespace flash_attention::cpu {
namespace {

struct Hook {
  ParallelFor function = nullptr;
  void* context = nullptr;
  int threads = 1;
  const Hook* replaced = nullptr;  // kept: a loop may be running on it
};

std::atomic<const Hook*> the_hook{nullptr};
thread_local const ParallelScope* the_scope = nullptr;
std::atomic<ThreadPool*> the_pool{nullptr};
std::mutex making;                  // the pool
std::atomic<bool> is_child{false};  // of fork()
thread_local bool inside = false;

int own_threads() {
  static const int usable = usable_processors();
  const int wanted = support::settings().threads;
  return wanted > 0 ? wanted : usable;
}

/// The pool is never destroyed: its threads may sleep at the end of the process.
ThreadPool& pool() {
  if (ThreadPool* made = the_pool.load()) return *made;
  const std::lock_guard lock(making);
  if (the_pool.load() == nullptr) the_pool = new ThreadPool(own_threads());
  return *the_pool;
}

/// A child of fork() has none of the threads. It forgets the pool and makes its own, and it does not use OpenMP, whose
/// teams would wait for threads that do not exist. The child must not inherit half-finished work of other threads: so
/// this waits for them, and makes everything that a first use would make. If no thread has used the library, the child
/// may set its own variables.
void before_fork() {
  try {
    if (support::settings_in_use()) {
      own_threads();
      if (support::settings().thread_source != support::ThreadSource::own) OpenMp::loaded();
    }
  } catch (...) {  // the call that needs the wrong setting reports it
  }
  making.lock();
}
void after_fork_in_parent() { making.unlock(); }
void after_fork_in_child() {
  the_pool = nullptr;
  is_child = true;
  OpenMp::after_fork();
  making.unlock();
}
const int registered = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);

using Clock = std::chrono::steady_clock;

Contention contention;

/// The threads that a loop would use now: whose, and how many.
struct Threads {
  int count;
  const Hook* hook = nullptr;
  const OpenMp* team = nullptr;  // neither: the pool
  const ParallelScope* scope = nullptr;

  static Threads now() {
    using support::ThreadSource;
    const support::Settings& settings = support::settings();
    if (the_scope != nullptr && settings.thread_source == ThreadSource::automatic) {
      const int most = settings.threads > 0 ? settings.threads : the_scope->threads;
      return {.count = std::min(most, the_scope->threads), .scope = the_scope};
    }
    const Hook* hook = the_hook.load(std::memory_order_acquire);
    if (hook != nullptr && hook->function != nullptr) return {.count = hook->threads, .hook = hook};
    const OpenMp* team = settings.thread_source == ThreadSource::own ? nullptr : OpenMp::loaded();
    if (team == nullptr) return {.count = settings.thread_source == ThreadSource::openmp ? 1 : own_threads()};
    const int wanted = team->threads(), most = settings.threads > 0 ? std::min(settings.threads, wanted) : wanted;
    if (is_child.load(std::memory_order_relaxed)) return {.count = std::min(most, own_threads())};
    return {.count = most, .team = team};
  }

  /// The pool, if the team would wait, unless the team was requested.
  static Threads in_a_crowd() {
    const Threads threads = now();
    const bool any = support::settings().thread_source == support::ThreadSource::automatic;
    if (threads.team == nullptr || !any || !contention.is_recent(Clock::now())) return threads;
    return {.count = std::min(threads.count, own_threads())};
  }
};

thread_local Clock::time_point last_end;  // of a timed call

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

int num_threads() { return inside ? 1 : Threads::now().count; }

std::string describe_threads() {
  const Threads threads = Threads::now();
  const std::string count = std::to_string(threads.count) + (threads.count == 1 ? " thread, " : " threads, ");
  if (threads.hook != nullptr) return count + "those of the caller (set_parallel_for)";
  if (threads.scope != nullptr) return count + "those of the caller (ParallelScope)";
  if (threads.team != nullptr) return count + "the OpenMP team of " + threads.team->library();
  if (support::settings().thread_source == support::ThreadSource::openmp) return count + "because no OpenMP is loaded";
  if (is_child && OpenMp::loaded() != nullptr) return count + "a pool of its own (OpenMP does not outlive fork)";
  return count + "a pool of its own";
}

Sharing::Sharing(double multiplications) : timed_(multiplications >= 1e5), worth_it_(multiplications >= 1e6) {
  if (!timed_ || worth_it_) return;
  // If another library keeps a team awake, it pays from 3e5 on: one query on 128 keys in float32 in a model takes 0.22
  // ms instead of 0.30 ms (Zen 4, two threads).
  if (multiplications >= 3e5 && Threads::now().team != nullptr) worth_it_ = true;
  if (Clock::now() - last_end < ThreadPool::stays_awake) worth_it_ = true;
}

Sharing::~Sharing() {
  if (timed_) last_end = Clock::now();
}

void parallel_for(std::int64_t count, bool serial, Body body, void* context) {
  const Threads threads = serial || inside || count < 2 ? Threads{.count = 1} : Threads::in_a_crowd();
  if (threads.count < 2) {
    for (std::int64_t i = 0; i < count; ++i) body(context, i);
    return;
  }
  Guarded guarded{body, context, {}, {}};
  if (threads.scope != nullptr) {
    threads.scope->parallel_for(threads.scope->context, count, Guarded::call, &guarded);
  } else if (threads.hook != nullptr) {
    threads.hook->function(threads.hook->context, count, Guarded::call, &guarded);
  } else if (threads.team != nullptr) {
    const bool on_time = threads.team->run(count, Guarded::call, &guarded, threads.count);
    on_time ? contention.saw_team() : contention.saw_late_team(Clock::now());
  } else {
    pool().run(count, Guarded::call, &guarded, threads.count);
  }
  if (guarded.error) std::rethrow_exception(guarded.error);
}

}  // namespace flash_attention::cpu

namespace flash_attention {

void set_parallel_for(ParallelFor parallel_for, void* context, int threads) {
  auto* hook = new cpu::Hook{parallel_for, context, std::max(threads, 1), cpu::the_hook};
  while (!cpu::the_hook.compare_exchange_weak(hook->replaced, hook)) {
  }
}

ParallelScope::ParallelScope(ParallelFor function, void* of_caller, int count)
    : parallel_for(function), context(of_caller), threads(count), outer_(cpu::the_scope) {
  if (threads > 0) cpu::the_scope = this;
}

ParallelScope::~ParallelScope() { cpu::the_scope = outer_; }

}  // namespace flash_attention
