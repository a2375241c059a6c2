// Calls from several threads at once: the same bits as one after the other. The thread sanitizer runs this program, too.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#include "flash_attention/attention.h"
#include "flash_attention/runtime.h"

namespace flash_attention {
namespace {

/// One forward and backward pass on inputs that depend on `number`; from 20 on large enough to be shared out.
std::vector<float> results_of(int number) {
  Problem problem;
  problem.batch = 2;
  problem.seq_q = 40 + number;
  problem.seq_kv = 70 + 3 * number;
  problem.heads_q = 4;
  problem.heads_kv = 2;
  problem.head_dim = 32;
  problem.causal = number % 2 == 0;
  problem.deterministic = true;
  const auto q_count = static_cast<std::size_t>(problem.batch * problem.seq_q * problem.heads_q * problem.head_dim);
  const auto kv_count = static_cast<std::size_t>(problem.batch * problem.seq_kv * problem.heads_kv * problem.head_dim);
  std::vector<float> q(q_count), k(kv_count), v(kv_count), dout(q_count), lse(q_count / 32);
  std::vector<float> all(2 * q_count + 2 * kv_count, -1);  // out, dq, dk, dv
  for (std::size_t n = 0; n < q_count; ++n)
    q[n] = std::sin(static_cast<float>(n + 1)), dout[n] = std::cos(static_cast<float>(n));
  for (std::size_t n = 0; n < kv_count; ++n)
    k[n] = std::cos(static_cast<float>(3 * n)), v[n] = std::sin(static_cast<float>(2 * n));

  Buffers buffers;
  buffers.q = q.data(), buffers.k = k.data(), buffers.v = v.data(), buffers.lse = lse.data();
  buffers.out = all.data();
  forward(problem, buffers);
  buffers.dout = dout.data();
  buffers.dq = all.data() + q_count;
  buffers.dk = all.data() + 2 * q_count;
  buffers.dv = all.data() + 2 * q_count + kv_count;
  struct alignas(256) Block {
    char bytes[256];
  };
  Options options;
  options.workspace_bytes = workspace_bytes(problem, Pass::backward);
  std::vector<Block> workspace(options.workspace_bytes / sizeof(Block) + 1);
  options.workspace = workspace.data();
  backward(problem, buffers, options);
  return all;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

TEST(Threads, CallsFromManyThreadsGiveTheSameBits) {
  constexpr int num_threads = 4, num_problems = 2;  // with and without a mask
  std::vector<std::vector<float>> wanted;
  for (int n = 0; n < num_problems; ++n) wanted.push_back(results_of(80 + n));
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < num_threads; ++t) {
    threads.emplace_back([&, t] {
      for (int n = 0; n < num_problems; ++n) {
        const int number = (n + t) % num_problems;
        if (!same_bits(results_of(80 + number), wanted[static_cast<std::size_t>(number)])) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(Threads, FirstCallsAtTheSameTime) {
  // Problems that nobody has planned yet: planning and the kernel cache are entered by all threads at once.
  std::vector<std::thread> threads;
  std::vector<std::vector<float>> got(4);
  for (std::size_t t = 0; t < got.size(); ++t) threads.emplace_back([&, t] { got[t] = results_of(50); });
  for (std::thread& thread : threads) thread.join();
  for (const std::vector<float>& result : got) EXPECT_TRUE(same_bits(result, got[0]));
}

TEST(Threads, AnEngineMayBringItsOwn) {
  const std::vector<float> wanted = results_of(90);
  std::atomic<std::int64_t> bodies = 0;
  const ParallelFor with_new_threads = [](void* context, std::int64_t count, void (*body)(void*, std::int64_t),
                                          void* body_context) {
    static_cast<std::atomic<std::int64_t>*>(context)->fetch_add(count);
    std::vector<std::thread> threads;
    for (std::int64_t n = 0; n < count; ++n) threads.emplace_back(body, body_context, n);
    for (std::thread& thread : threads) thread.join();
  };
  set_parallel_for(with_new_threads, &bodies, device_info({}).threads);  // as many: the sums are split alike
  const std::vector<float> got = results_of(90);
  set_parallel_for(nullptr, nullptr, 0);
  EXPECT_GT(bodies, 0);
  EXPECT_TRUE(same_bits(got, wanted));
}

}  // namespace
}  // namespace flash_attention
