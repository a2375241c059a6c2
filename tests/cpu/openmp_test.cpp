#include "cpu/threads/openmp.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "cpu/threads/parallel.h"
#include "support/settings.h"

// GCC's runtime is loaded as torch's wheels load theirs: seen by nobody else. It has what LLVM's has under another name,
// which a fake stands for.

namespace flash_attention::cpu {
namespace {

/// A loop that notes which threads took part, each once for each index.
struct Loop {
  explicit Loop(std::int64_t size) : each(static_cast<std::size_t>(size)) {}
  std::vector<std::atomic<int>> each;
  std::mutex mutex;
  std::set<std::thread::id> threads;

  static void body(void* context, std::int64_t i) {
    Loop& self = *static_cast<Loop*>(context);
    ++self.each[static_cast<std::size_t>(i)];
    std::this_thread::sleep_for(std::chrono::microseconds(100));  // so that the others come, too
    const std::lock_guard lock(self.mutex);
    self.threads.insert(std::this_thread::get_id());
  }
  bool all_once() const {
    for (const auto& n : each) {
      if (n != 1) return false;
    }
    return true;
  }
};

/// The library that offers both entries' functions for the tests themselves.
struct Library {
  explicit Library(const std::string& path) : handle(dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL)) {}
  void set_threads(int threads) const { reinterpret_cast<void (*)(int)>(dlsym(handle, "omp_set_num_threads"))(threads); }
  void* handle;
};

void check_runtime(const Library& library) {
  const OpenMp* runtime = OpenMp::in(library.handle);
  ASSERT_NE(runtime, nullptr);
  library.set_threads(3);
  EXPECT_EQ(runtime->threads(), 3);
  for (const std::int64_t size : {2, 3, 17, 200}) {
    Loop loop(size);
    runtime->run(size, Loop::body, &loop, runtime->threads());
    EXPECT_TRUE(loop.all_once()) << size;
    EXPECT_LE(loop.threads.size(), 3u);
  }
  Loop shared(300);
  runtime->run(300, Loop::body, &shared, 3);
  EXPECT_EQ(shared.threads.size(), 3u);
  std::atomic<int> inside{0};
  const auto nested = [&] { inside = runtime->threads(); };
  runtime->run(
      2, [](void* context, std::int64_t) { (*static_cast<decltype(nested)*>(context))(); },
      const_cast<void*>(static_cast<const void*>(&nested)), 3);
  EXPECT_EQ(inside, 1);  // a region does not begin another
  library.set_threads(1);
  EXPECT_EQ(runtime->threads(), 1);
}

const Library& gcc_runtime() {
  static const Library library("libgomp.so.1");
  return library;
}

class OpenMpTeam : public ::testing::Test {
 protected:
  void SetUp() override {
#if defined(__SANITIZE_THREAD__)
    GTEST_SKIP() << "the thread sanitizer does not know the barriers of libgomp";
#endif
    if (gcc_runtime().handle == nullptr) GTEST_SKIP() << "libgomp.so.1 is not here";
    std::this_thread::sleep_for(std::chrono::milliseconds(120));  // until it looks again for a runtime
  }
};

TEST(OpenMpRuntime, WithTheEntryOfLlvm) { check_runtime(Library(FLASH_ATTENTION_FAKES "/libfake_openmp.so")); }

TEST(OpenMpRuntime, TellsThatItWaitedForThreadsThatCameLate) {
  const Library library(FLASH_ATTENTION_FAKES "/libfake_openmp.so");
  const OpenMp* runtime = OpenMp::in(library.handle);
  const auto set_delay = reinterpret_cast<void (*)(int)>(dlsym(library.handle, "fake_set_delay"));
  ASSERT_NE(set_delay, nullptr);
  library.set_threads(2);
  set_delay(30);
  Loop short_loop(4);
  EXPECT_FALSE(runtime->run(4, Loop::body, &short_loop, 2));
  EXPECT_TRUE(short_loop.all_once());
  Loop long_loop(1000);  // of more than 0.1 s: the other one comes in time to do some of it
  EXPECT_TRUE(runtime->run(1000, Loop::body, &long_loop, 2));
  set_delay(0);
}

TEST(OpenMpRuntime, IsNotFoundInOtherLibraries) {
  const Library library("libc.so.6");
  EXPECT_EQ(OpenMp::in(library.handle), nullptr);
}

TEST_F(OpenMpTeam, WithTheEntryOfGcc) { check_runtime(gcc_runtime()); }

TEST_F(OpenMpTeam, IsFoundWhereItIsLoadedAndAskedForEachLoop) {
  ASSERT_NE(OpenMp::loaded(), nullptr);
  EXPECT_NE(OpenMp::loaded()->library().find("libgomp"), std::string::npos);
  for (const int threads : {3, 1, 2}) {
    gcc_runtime().set_threads(threads);
    EXPECT_EQ(num_threads(), threads);
    Loop loop(100), team(100);
    parallel_for(100, false, Loop::body, &loop);
    EXPECT_TRUE(loop.all_once());
    EXPECT_LE(loop.threads.size(), static_cast<std::size_t>(threads));
    OpenMp::loaded()->run(100, Loop::body, &team, threads);
    EXPECT_EQ(team.threads.size(), static_cast<std::size_t>(threads));
    EXPECT_NE(describe_threads().find("libgomp"), std::string::npos);
  }
}

TEST_F(OpenMpTeam, SeveralCallersAtOnce) {
  std::atomic<bool> good{true};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&] {
      gcc_runtime().set_threads(2);
      for (int repeat = 0; repeat < 20; ++repeat) {
        Loop loop(10);
        parallel_for(10, false, Loop::body, &loop);
        if (!loop.all_once()) good = false;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_TRUE(good);
}

TEST_F(OpenMpTeam, ThrowsWhatABodyThrows) {
  gcc_runtime().set_threads(2);
  EXPECT_THROW(parallel_for(
                   10, false,
                   [](void*, std::int64_t i) {
                     if (i == 7) throw std::runtime_error("seven");
                   },
                   nullptr),
               std::runtime_error);
}

TEST_F(OpenMpTeam, IsLeftAloneInTheChildOfFork) {
  gcc_runtime().set_threads(2);
  Loop before(100);
  parallel_for(100, false, Loop::body, &before);  // now there is a team, which the child does not have
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);
    Loop loop(100);
    parallel_for(100, false, Loop::body, &loop);
    gcc_runtime().set_threads(1);  // as torch does in the workers of a DataLoader
    _exit(loop.all_once() && num_threads() == 1 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

}  // namespace
}  // namespace flash_attention::cpu
