// Calls at the end of a thread and of the process, when what the library keeps might be gone.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <thread>
#include <vector>

#include "flash_attention/attention.h"

namespace flash_attention {
namespace {

/// A call that is shared by threads and needs buffers of each: from 1e6 multiplications on, which 70 queries on 70 keys
/// have. Another length, another plan.
void call_attention(std::int64_t length) {
  Problem problem;
  problem.batch = 1;
  problem.seq_q = problem.seq_kv = length;
  problem.heads_q = problem.heads_kv = 4;
  problem.head_dim = 64;
  const auto count = static_cast<std::size_t>(length * 4 * 64);
  const std::vector<float> in(count, 0.5f);
  std::vector<float> out(count), lse(static_cast<std::size_t>(length * 4));
  Buffers buffers;
  buffers.q = buffers.k = buffers.v = in.data();
  buffers.out = out.data();
  buffers.lse = lse.data();
  Options options;
  options.workspace_bytes = workspace_bytes(problem, Pass::forward);
  void* workspace = std::aligned_alloc(256, (options.workspace_bytes + 511) / 256 * 256);
  options.workspace = workspace;
  forward(problem, buffers, options);
  std::free(workspace);
  if (!(std::fabs(out[0] - 0.5f) < 1e-4f)) _exit(3);
}

struct CallsAtItsEnd {
  std::int64_t length;
  ~CallsAtItsEnd() { call_attention(length); }
};

/// How a forked process ends that runs the body and then exits in the ordinary way.
int status_after(void (*body)()) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    body();
    std::exit(0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return status;
}

TEST(EndOfProcess, CallsFromAtExitAndStaticDestructors) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the thread sanitizer does not allow threads after fork";
#endif
  EXPECT_EQ(status_after([] {
              std::atexit([] { call_attention(101); });  // before the library's first use: it runs after what that leaves
              static const CallsAtItsEnd last{102};
              call_attention(100);
            }),
            0);
}

TEST(EndOfProcess, CallsFromADestructorOfTheThread) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the thread sanitizer does not allow threads after fork";
#endif
  EXPECT_EQ(status_after([] {
              for (int i = 0; i < 3; ++i) {
                std::thread([] {
                  thread_local const CallsAtItsEnd last{111};
                  (void)&last;
                  call_attention(110);
                }).join();
              }
            }),
            0);
}

TEST(EndOfProcess, CallsOfAThreadThatNobodyWaitsFor) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the thread sanitizer does not allow threads after fork";
#endif
  for (int repeat = 0; repeat < 5; ++repeat) {
    EXPECT_EQ(status_after([] {
                static std::atomic<int> calls{0};
                std::thread([] {
                  for (std::int64_t n = 0;; n = (n + 1) % 50) call_attention(80 + n), ++calls;
                }).detach();
                while (calls < 20) std::this_thread::yield();
              }),
              0);
  }
}

}  // namespace
}  // namespace flash_attention
