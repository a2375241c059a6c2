#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include "support/compile.h"
#include "support/folder.h"

// The real NVRTC, on a machine with or without a GPU, and the checks that other compile tests rely on.
namespace flash_attention::testing {
namespace {

constexpr char scale_kernel[] = R"(
#include "abi/args.h"
#include "abi/config.h"
template <flash_attention::abi::ForwardConfig config>
__device__ void entry(const flash_attention::abi::AttentionArgs& args) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < args.total_q) static_cast<float*>(args.O.data)[i] = args.scale * static_cast<const float*>(args.Q.data)[i] * config.head_dim;
}
)";

// 128 sums alive at once in blocks of 1024 threads, which leave each thread 64 registers.
constexpr char spilling_kernel[] = R"(
#include "abi/args.h"
__device__ void entry(const flash_attention::abi::AttentionArgs& args) {
  float sums[128] = {};
  const float* in = static_cast<const float*>(args.Q.data);
  for (int row = 0; row < args.seq_q; ++row) {
#pragma unroll
    for (int i = 0; i < 128; ++i) sums[i] += in[row * 128 + i] * in[threadIdx.x];
  }
#pragma unroll
  for (int i = 0; i < 128; ++i) static_cast<float*>(args.O.data)[threadIdx.x * 128 + i] = sums[i];
}
)";

// Touches the accumulator of a product that may still be running.
constexpr char careless_wgmma_kernel[] = R"(
#include "abi/args.h"
__device__ void entry(const flash_attention::abi::AttentionArgs& args) {
  float d[4] = {};
  asm volatile("wgmma.fence.sync.aligned;");
  for (int i = 0; i < args.seq_q; ++i) {
    const unsigned long long at = args.seed + i;
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(at), "l"(at));
    d[0] *= args.scale;
  }
  asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;");
  static_cast<float*>(args.O.data)[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
}
)";

class NvrtcTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = why_no_compiler(); !reason.empty()) GTEST_SKIP() << reason;
    const std::filesystem::path kernels = std::filesystem::path(FLASH_ATTENTION_ROOT) / "kernels";
    for (const auto& file : std::filesystem::directory_iterator(kernels / "abi"))
      write_text(folder_ / "abi" / file.path().filename(), read_text(file.path()));
    ::setenv("FLASH_ATTENTION_KERNEL_DIR", folder_.path().c_str(), 1);  // for the children, which read the settings
  }

  Plan plan_of(const char* source, const std::string& config, int block) {
    write_text(folder_ / "forward/demo.cuh", source);
    Plan plan;
    plan.launches = {{.unit = "forward/demo", .entry = "entry", .config = config, .block = block}};
    return plan;
  }

  CompileOutcome compile(const Plan& plan, int arch) {
    return compile_in_children({jit::make_key(plan.launches[0], arch)}).front();
  }

  TemporaryFolder folder_;
};

TEST_F(NvrtcTest, a_kernel_compiles_for_every_generation) {
  const Plan plan = plan_of(scale_kernel, "ForwardConfig{.features = {.dtype = Type::float16}, .head_dim = 64}", 128);
  for (const int arch : {75, 80, 90, 100}) {
    const CompileOutcome outcome = compile(plan, arch);
    EXPECT_EQ(outcome.error, "");
    EXPECT_GT(outcome.report.registers, 0);
  }
  expect_plan_compiles(plan, 80);
  expect_plan_compiles(plan, 90);
}

TEST_F(NvrtcTest, an_error_comes_with_the_line) {
  const CompileOutcome outcome = compile(plan_of("__device__ void entry() {\n  int x = undeclared;\n}\n", "", 32), 80);
  EXPECT_NE(outcome.error.find("forward/demo.cuh(2): error"), std::string::npos) << outcome.error;
  EXPECT_NE(outcome.error.find("undeclared"), std::string::npos) << outcome.error;
}

TEST_F(NvrtcTest, spilled_registers_fail_a_compile_test) {
  const Plan plan = plan_of(spilling_kernel, "", 1024);
  EXPECT_GT(compile(plan, 80).report.spill_store_bytes, 0);
  ::testing::TestPartResultArray failures;
  {
    const ::testing::ScopedFakeTestPartResultReporter listen(
        ::testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &failures);
    expect_plan_compiles(plan, 80);
  }
  EXPECT_EQ(failures.size(), 2) << "stores and loads";
}

TEST_F(NvrtcTest, careless_wgmma_fails_a_compile_test) {
  const Plan plan = plan_of(careless_wgmma_kernel, "", 128);
  const CompileOutcome outcome = compile(plan, 90);
  EXPECT_EQ(outcome.error, "");
  EXPECT_FALSE(outcome.report.wgmma_warnings.empty());
}

TEST_F(NvrtcTest, too_much_shared_memory_fails_a_compile_test) {
  Plan plan = plan_of(scale_kernel, "ForwardConfig{.head_dim = 64}", 128);
  plan.launches[0].shared_bytes = 163 * 1024 + 1;
  EXPECT_NONFATAL_FAILURE(expect_plan_compiles(plan, 80), "shared memory of one block");
  expect_plan_compiles(plan, 90);
}

}  // namespace
}  // namespace flash_attention::testing
