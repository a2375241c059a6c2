#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "cuda/backend.h"
#include "cuda/memory.h"
#include "flash_attention/attention.h"
#include "flash_attention/runtime.h"

// The public calls on a real GPU: streams, graphs and threads. What they compute is the contract suite's business.
namespace flash_attention {
namespace {

using cuda::CapturedGraph;
using cuda::DeviceMemory;
using cuda::OwnedStream;

class GpuForwardTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const Finding& finding : cuda::diagnose()) {
      if (!finding.ok) GTEST_SKIP() << "no GPU: " << finding.detail;
    }
    problem = {.batch = 2,
               .seq_q = 200,
               .seq_kv = 200,
               .heads_q = 4,
               .heads_kv = 2,
               .head_dim = 64,
               .dtype = Dtype::float32,
               .causal = true};
    elements = static_cast<std::size_t>(problem.batch * problem.seq_q * problem.heads_q * problem.head_dim);
    for (int i = 0; i < 3; ++i) inputs.push_back(random_tensor(i));
  }

  DeviceMemory random_tensor(int seed) const {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> values(elements);
    for (float& value : values) value = normal(random);
    DeviceMemory memory(0, elements * sizeof(float));
    memory.upload(values.data(), elements * sizeof(float));
    return memory;
  }

  /// Memory for one call's results.
  struct Result {
    explicit Result(std::size_t count) : out(0, count * sizeof(float)), lse(0, count * sizeof(float)) { out.fill(0xff); }
    std::vector<float> values() const {
      std::vector<float> all(out.size() / sizeof(float));
      out.download(all.data(), out.size());
      return all;
    }
    DeviceMemory out, lse;
  };

  Buffers buffers(const Result& result) const {
    return {.q = inputs[0].data(),
            .k = inputs[1].data(),
            .v = inputs[2].data(),
            .out = result.out.data(),
            .lse = static_cast<float*>(result.lse.data())};
  }

  static Options on(const void* stream) {
    return {.device = {DeviceKind::cuda, 0, 0}, .stream = const_cast<void*>(stream)};
  }

  /// The result on the default stream.
  std::vector<float> expected() const {
    const Result result(elements);
    forward(problem, buffers(result), on(nullptr));
    cuda::synchronize(0);
    return result.values();
  }

  Problem problem;
  std::size_t elements = 0;
  std::vector<DeviceMemory> inputs;
};

TEST_F(GpuForwardTest, a_stream_of_the_callers_own) {
  const std::vector<float> wanted = expected();
  const OwnedStream stream(0);
  const Result result(elements);
  cuda::synchronize(0);
  forward(problem, buffers(result), on(stream.handle()));
  stream.synchronize();
  EXPECT_EQ(result.values(), wanted);
}

TEST_F(GpuForwardTest, captured_into_a_graph_after_prewarm) {
  const OwnedStream stream(0);
  prewarm(problem, Pass::forward, on(stream.handle()));
  const Result result(elements);
  cuda::synchronize(0);
  CapturedGraph graph(0, stream.handle());
  forward(problem, buffers(result), on(stream.handle()));
  graph.end();
  graph.launch(stream.handle());
  graph.launch(stream.handle());
  stream.synchronize();
  EXPECT_EQ(result.values(), expected());
}

TEST_F(GpuForwardTest, captured_without_prewarm_is_refused_and_the_next_call_works) {
  problem.softcap = 20;  // a kernel that no other test of this program uses
  const OwnedStream stream(0);
  const Result result(elements);
  {
    const CapturedGraph graph(0, stream.handle());
    try {
      forward(problem, buffers(result), on(stream.handle()));
      ADD_FAILURE() << "compiled during a capture";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("prewarm"), std::string::npos) << error.what();
    }
  }
  forward(problem, buffers(result), on(stream.handle()));
  stream.synchronize();
  EXPECT_EQ(result.values(), expected());
}

TEST_F(GpuForwardTest, threads_share_kernels) {
  const std::vector<float> wanted = expected();
  std::vector<std::jthread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      const OwnedStream stream(0);
      for (int round = 0; round < 20; ++round) {
        const Result result(elements);
        cuda::synchronize(0);
        forward(problem, buffers(result), on(stream.handle()));
        stream.synchronize();
        EXPECT_EQ(result.values(), wanted);
      }
    });
  }
}

}  // namespace
}  // namespace flash_attention
