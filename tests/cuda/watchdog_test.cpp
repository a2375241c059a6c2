// FLASH_ATTENTION_CHECK=1 on a GPU that computes nothing: what lies in its memory is what its kernels have "written".
#include <stdlib.h>

#include <cmath>

#include "cuda/fake_environment.h"
#include "flash_attention/attention.h"

namespace flash_attention::cuda {
namespace {

using testing::error_of;
using testing::fake_stream;
using testing::FakeCudaTest;

constexpr std::int64_t rows = 3, keys = 4, dim = 8;

/// All keys are 0, so every output is the mean of the values, and lse is log(keys).
struct Call {
  alignas(16) float q[rows * dim] = {}, k[keys * dim] = {}, v[keys * dim] = {}, out[rows * dim] = {};
  float lse[rows] = {};
  Problem problem{.seq_q = rows, .seq_kv = keys, .head_dim = dim};

  Call() {
    for (std::int64_t j = 0; j < keys; ++j)
      for (std::int64_t d = 0; d < dim; ++d) v[j * dim + d] = static_cast<float>(j * d);
    for (std::int64_t i = 0; i < rows; ++i) {
      lse[i] = std::log(static_cast<float>(keys));
      for (std::int64_t d = 0; d < dim; ++d) out[i * dim + d] = 1.5f * static_cast<float>(d);
    }
  }
  void run() {
    forward(problem, {.q = q, .k = k, .v = v, .out = out, .lse = lse},
            {.device = {.kind = DeviceKind::cuda, .index = 1}, .stream = fake_stream(1), .kernel = "forward/portable"});
  }
};

class CudaWatchdog : public FakeCudaTest {
 protected:
  CudaWatchdog() { ::setenv("FLASH_ATTENTION_CHECK", "1", 1); }  // before the first call reads the settings
};

TEST_F(CudaWatchdog, waits_for_the_stream_and_compares_what_is_in_the_gpus_memory) {
  Call right;
  right.run();
  EXPECT_GT(times_called("cuStreamSynchronize"), 0);
  EXPECT_EQ(times_called("cuLaunchKernelEx"), 1);
  EXPECT_TRUE(cu.contexts.empty());

  Call wrong;
  wrong.out[2 * dim + 3] += 1;
  const std::string text = error_of(ErrorCode::internal, [&] { wrong.run(); });
  for (const char* part :
       {"FLASH_ATTENTION_CHECK: forward/portable differs from fp64 in out[batch 0, query 2, head 0, column 3]",
        "got 5.5, expected 4.5", "forward of float32"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " is not in: " << text;
  }
}

TEST_F(CudaWatchdog, a_call_that_is_captured_is_passed_over) {
  Call{}.run();  // loads the kernel
  Call wrong;
  wrong.out[0] = 7;
  cu.capturing = true;
  const auto waited = times_called("cuStreamSynchronize");
  wrong.run();
  EXPECT_EQ(times_called("cuStreamSynchronize"), waited);
}

}  // namespace
}  // namespace flash_attention::cuda
