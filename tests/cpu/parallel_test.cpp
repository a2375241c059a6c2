#include "cpu/parallel.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
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

}  // namespace
}  // namespace flash_attention::cpu
