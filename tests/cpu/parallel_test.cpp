#include "cpu/threads/parallel.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include "flash_attention/runtime.h"

namespace flash_attention::cpu {
namespace {

struct Counts {
  explicit Counts(std::int64_t size) : each(static_cast<std::size_t>(size)) {}
  std::vector<std::atomic<int>> each;

  static void count(void* self, std::int64_t i) { ++static_cast<Counts*>(self)->each[static_cast<std::size_t>(i)]; }
  bool all_once() const {
    for (const auto& n : each) {
      if (n != 1) return false;
    }
    return true;
  }
};

TEST(ThreadPool, RunsEachIndexOnce) {
  ThreadPool pool(4);
  EXPECT_EQ(pool.threads(), 4);
  for (std::int64_t size : {0, 1, 2, 3, 17, 1000}) {
    for (int repeat = 0; repeat < 50; ++repeat) {
      Counts counts(size);
      pool.run(size, Counts::count, &counts);
      ASSERT_TRUE(counts.all_once()) << size;
    }
  }
}

TEST(ThreadPool, WorkersWakeFromSleep) {
  ThreadPool pool(3);
  for (int repeat = 0; repeat < 5; ++repeat) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    Counts counts(64);
    pool.run(64, Counts::count, &counts);
    ASSERT_TRUE(counts.all_once());
  }
}

TEST(ThreadPool, OtherThreadsHelp) {
  ThreadPool pool(2);
  struct Meeting {
    std::atomic<int> here{0};
  } meeting;
  // Each of the two bodies waits for the other: one thread alone would never return.
  pool.run(
      2,
      [](void* context, std::int64_t) {
        Meeting& m = *static_cast<Meeting*>(context);
        ++m.here;
        while (m.here < 2) std::this_thread::yield();
      },
      &meeting);
  EXPECT_EQ(meeting.here, 2);
}

TEST(ThreadPool, SeveralCallersAtOnce) {
  ThreadPool pool(3);
  std::vector<std::thread> callers;
  std::atomic<bool> good{true};
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int repeat = 0; repeat < 200; ++repeat) {
        Counts counts(20);
        pool.run(20, Counts::count, &counts);
        if (!counts.all_once()) good = false;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_TRUE(good);
}

TEST(ThreadPool, TakesFewerThreadsIfAsked) {
  ThreadPool pool(4);
  struct Seen {
    std::mutex mutex;
    std::set<std::thread::id> threads;
  };
  for (const int threads : {1, 2, 3, 4, 2}) {
    Seen seen;
    pool.run(
        200,
        [](void* context, std::int64_t) {
          Seen& s = *static_cast<Seen*>(context);
          const std::lock_guard lock(s.mutex);
          s.threads.insert(std::this_thread::get_id());
        },
        &seen, threads);
    EXPECT_LE(seen.threads.size(), static_cast<std::size_t>(threads));
    Counts counts(37);
    pool.run(37, Counts::count, &counts, threads);
    EXPECT_TRUE(counts.all_once());
  }
}

/// Where the workers of a pool may run, seen from a loop that they took part in.
cpu_set_t mask_of_workers(ThreadPool& pool) {
  struct Seen {
    std::thread::id caller = std::this_thread::get_id();
    std::mutex mutex;
    cpu_set_t all{};
  } seen;
  while (CPU_COUNT(&seen.all) == 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the workers sleep: they are told where to wake up
    pool.run(
        64,
        [](void* context, std::int64_t) {
          Seen& s = *static_cast<Seen*>(context);
          std::this_thread::sleep_for(std::chrono::microseconds(50));
          if (std::this_thread::get_id() == s.caller) return;
          cpu_set_t mine;
          CPU_ZERO(&mine);
          sched_getaffinity(0, sizeof mine, &mine);
          const std::lock_guard lock(s.mutex);
          CPU_OR(&s.all, &s.all, &mine);
        },
        &seen);
  }
  return seen.all;
}

TEST(ThreadPool, KeepsOffAPinnedCallerToo) {
  cpu_set_t all;
  CPU_ZERO(&all);
  ASSERT_EQ(sched_getaffinity(0, sizeof all, &all), 0);
  if (CPU_COUNT(&all) < 2) GTEST_SKIP() << "there is one processor";
  ThreadPool pool(2);
  cpu_set_t workers = mask_of_workers(pool);
  std::size_t one = 0;
  while (!CPU_ISSET(one, &workers)) ++one;
  std::thread([&] {
    cpu_set_t pin;
    CPU_ZERO(&pin);
    CPU_SET(one, &pin);
    ASSERT_EQ(sched_setaffinity(0, sizeof pin, &pin), 0);
    workers = mask_of_workers(pool);
  }).join();
  EXPECT_FALSE(CPU_ISSET(one, &workers));
  EXPECT_EQ(CPU_COUNT(&workers), CPU_COUNT(&all) - 1);
}

TEST(ThreadPool, GoesOnWithTheThreadsThatStarted) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can leave its user";
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const rlimit none{.rlim_cur = 1, .rlim_max = 1};
    if (setuid(65533) != 0 || setrlimit(RLIMIT_NPROC, &none) != 0) _exit(2);
    ThreadPool pool(8);
    Counts counts(100);
    pool.run(100, Counts::count, &counts);
    _exit(counts.all_once() && pool.threads() < 8 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST(ParallelFor, NestedLoopsRunInPlace) {
  struct Outer {
    std::atomic<int> inner{0};
  } outer;
  parallel_for(
      8, false,
      [](void* context, std::int64_t) {
        parallel_for(
            8, false, [](void* c, std::int64_t) { ++static_cast<Outer*>(c)->inner; }, context);
      },
      &outer);
  EXPECT_EQ(outer.inner, 64);
}

TEST(ParallelFor, ThrowsWhatABodyThrows) {
  EXPECT_THROW(parallel_for(
                   10, false,
                   [](void*, std::int64_t i) {
                     if (i == 7) throw std::runtime_error("seven");
                   },
                   nullptr),
               std::runtime_error);
}

TEST(ParallelFor, WorksAfterFork) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the thread sanitizer does not allow threads after fork";
#endif
  Counts before(100);
  parallel_for(100, false, Counts::count, &before);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    Counts counts(100);
    parallel_for(100, false, Counts::count, &counts);
    _exit(counts.all_once() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST(ParallelFor, UsesTheCallersHook) {
  static int loops = 0;
  set_parallel_for(
      [](void*, std::int64_t count, void (*body)(void*, std::int64_t), void* context) {
        ++loops;
        for (std::int64_t i = count; i-- > 0;) body(context, i);
      },
      nullptr, 5);
  EXPECT_EQ(num_threads(), 5);
  Counts counts(9);
  parallel_for(9, false, Counts::count, &counts);
  set_parallel_for(nullptr, nullptr, 0);
  EXPECT_TRUE(counts.all_once());
  EXPECT_EQ(loops, 1);
  EXPECT_NE(num_threads(), 0);
}

TEST(ParallelFor, AScopeIsOfItsThreadAndItsLife) {
  const auto backwards = [](void* loops, std::int64_t count, void (*body)(void*, std::int64_t), void* context) {
    ++*static_cast<int*>(loops);
    for (std::int64_t i = count; i-- > 0;) body(context, i);
  };
  const int usual = num_threads();
  int loops = 0, inner_loops = 0;
  {
    const ParallelScope outer(backwards, &loops, 5);
    EXPECT_EQ(num_threads(), 5);
    {
      const ParallelScope none(backwards, &inner_loops, 0);
      EXPECT_EQ(num_threads(), 5);
      const ParallelScope inner(backwards, &inner_loops, 3);
      EXPECT_EQ(num_threads(), 3);
      Counts counts(9);
      parallel_for(9, false, Counts::count, &counts);
      EXPECT_TRUE(counts.all_once());
    }
    int elsewhere = 0;
    std::thread([&] { elsewhere = num_threads(); }).join();
    EXPECT_EQ(elsewhere, usual);
    Counts counts(9);
    parallel_for(9, false, Counts::count, &counts);
    EXPECT_TRUE(counts.all_once());
  }
  EXPECT_EQ(num_threads(), usual);
  EXPECT_EQ(loops, 1);
  EXPECT_EQ(inner_loops, 1);
}

}  // namespace
}  // namespace flash_attention::cpu
