#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "cuda/backend.h"
#include "cuda/context.h"
#include "cuda/memory.h"
#include "cuda/tensor_map.h"
#include "flash_attention/error.h"
#include "support/folder.h"

// The driver room on a real GPU, with kernels small enough to know what they must give.
namespace flash_attention::cuda {
namespace {

using testing::TemporaryFolder;

constexpr char kernels[] = R"(
#include "abi/args.h"
using flash_attention::abi::AttentionArgs;

__device__ int index() { return blockIdx.x * blockDim.x + threadIdx.x; }

__device__ void scale(const AttentionArgs& args) {
  const int i = index();
  if (i < args.total_q) static_cast<float*>(args.O.data)[i] = args.scale * static_cast<const float*>(args.Q.data)[i];
}

__device__ void add_one(const AttentionArgs& args) {
  const int i = index();
  if (i < args.total_q) static_cast<float*>(args.O.data)[i] += 1;
}

// Through 100000 bytes of dynamic shared memory, from the far end.
__device__ void reverse_in_shared(const AttentionArgs& args) {
  extern __shared__ float buffer[];
  float* top = buffer + 25000 - blockDim.x;
  top[threadIdx.x] = static_cast<const float*>(args.Q.data)[threadIdx.x];
  __syncthreads();
  static_cast<float*>(args.O.data)[threadIdx.x] = top[blockDim.x - 1 - threadIdx.x];
}

__device__ void cluster_size(const AttentionArgs& args) {
  unsigned size;
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
  if (threadIdx.x == 0) static_cast<float*>(args.O.data)[blockIdx.x] = size;
}
)";

class GpuLaunchTest : public ::testing::Test {
 protected:
  static constexpr int count = 1000;

  static void SetUpTestSuite() {
    folder_ = std::make_unique<TemporaryFolder>();
    const auto abi = std::filesystem::path(FLASH_ATTENTION_ROOT) / "kernels" / "abi";
    for (const auto& file : std::filesystem::directory_iterator(abi)) {
      testing::write_text(*folder_ / "abi" / file.path().filename(), testing::read_text(file.path()));
    }
    testing::write_text(*folder_ / "demo/small.cuh", kernels);
    ::setenv("FLASH_ATTENTION_KERNEL_DIR", folder_->path().c_str(), 1);
    ::setenv("FLASH_ATTENTION_CACHE_DIR", (*folder_ / "cache").c_str(), 1);
  }
  static void TearDownTestSuite() { folder_.reset(); }

  void SetUp() override {
    for (const Finding& finding : diagnose()) {
      if (!finding.ok) GTEST_SKIP() << "no GPU: " << finding.detail;
    }
    gpu = info(0);
    problem =
        Problem{.batch = 1, .seq_q = count, .seq_kv = 1, .head_dim = 8, .head_dim_v = 8, .total_q = count, .scale = 3.0f};
    input.resize(count);
    std::iota(input.begin(), input.end(), 0.0f);
    in = std::make_unique<DeviceMemory>(0, count * sizeof(float));
    out = std::make_unique<DeviceMemory>(0, count * sizeof(float));
    in->upload(input.data(), count * sizeof(float));
    out->fill(0xff);
    synchronize(0);
  }

  static Launch launch_of(const char* entry, int grid, int block) {
    return {.unit = "demo/small", .entry = entry, .config = "", .grid = {grid, 1, 1}, .block = block};
  }

  Buffers buffers() const { return {.q = in->data(), .out = out->data()}; }

  std::vector<float> output() const {
    std::vector<float> values(count);
    out->download(values.data(), count * sizeof(float));
    return values;
  }

  void expect_scaled(float factor, float offset) const {
    const std::vector<float> got = output();
    for (int i = 0; i < count; ++i) ASSERT_EQ(got[i], factor * input[i] + offset) << i;
  }

  static std::unique_ptr<TemporaryFolder> folder_;
  DeviceInfo gpu;
  Problem problem;
  std::vector<float> input;
  std::unique_ptr<DeviceMemory> in, out;
};
std::unique_ptr<TemporaryFolder> GpuLaunchTest::folder_;

TEST_F(GpuLaunchTest, facts_about_the_gpu) {
  EXPECT_FALSE(gpu.name.empty());
  EXPECT_GE(gpu.arch, 70);
  EXPECT_GT(gpu.num_sms, 0);
  EXPECT_GE(gpu.shared_bytes, 48 << 10);
  EXPECT_GT(gpu.memory_bytes, std::int64_t{1} << 30);
}

TEST_F(GpuLaunchTest, launches_of_a_plan_run_in_order_on_both_kinds_of_stream) {
  Plan plan;
  plan.launches = {launch_of("scale", 4, 256), launch_of("add_one", 4, 256), launch_of("add_one", 4, 256)};
  const auto kernel = load_kernel(plan, gpu);
  kernel->launch(problem, plan, buffers(), {.device = gpu.device});
  synchronize(0);
  expect_scaled(3, 2);

  problem.scale = 5.0f;
  const OwnedStream stream(0);
  kernel->launch(problem, plan, buffers(), {.device = gpu.device, .stream = stream.handle()});
  stream.synchronize();
  expect_scaled(5, 2);
}

TEST_F(GpuLaunchTest, a_captured_call_runs_again_and_again) {
  Plan plan;
  plan.launches = {launch_of("scale", 4, 256), launch_of("add_one", 4, 256)};
  const auto kernel = load_kernel(plan, gpu);
  const OwnedStream stream(0);
  CapturedGraph graph(0, stream.handle());
  kernel->launch(problem, plan, buffers(), {.device = gpu.device, .stream = stream.handle()});
  graph.end();
  EXPECT_NE(output()[1], 4.0f) << "captured, not run";
  for (int round = 1; round <= 3; ++round) {
    for (float& value : input) value += 1;
    in->upload(input.data(), count * sizeof(float));
    graph.launch(stream.handle());
    stream.synchronize();
    expect_scaled(3, 1);
  }
}

TEST_F(GpuLaunchTest, a_kernel_that_is_not_loaded_is_refused_in_a_capture_which_goes_on) {
  Plan loaded, fresh;
  loaded.launches = {launch_of("scale", 4, 256)};
  fresh.launches = {launch_of("scale", 8, 128)};  // other launch bounds: another kernel
  const auto kernel = load_kernel(loaded, gpu);
  const OwnedStream stream(0);
  CapturedGraph graph(0, stream.handle());
  try {
    load_kernel(fresh, gpu, stream.handle());
    ADD_FAILURE() << "loaded during a capture";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unavailable);
    EXPECT_NE(std::string(error.what()).find("prewarm"), std::string::npos) << error.what();
  }
  load_kernel(loaded, gpu, stream.handle())
      ->launch(problem, loaded, buffers(), {.device = gpu.device, .stream = stream.handle()});
  graph.end();
  graph.launch(stream.handle());
  stream.synchronize();
  expect_scaled(3, 0);
}

TEST_F(GpuLaunchTest, more_shared_memory_than_48_kilobytes) {
  if (gpu.shared_bytes < 100000) GTEST_SKIP() << gpu.name << " has no 100000 bytes of shared memory for a block";
  Plan plan;
  plan.launches = {launch_of("reverse_in_shared", 1, 1000)};
  plan.launches[0].shared_bytes = 100000;
  load_kernel(plan, gpu)->launch(problem, plan, buffers(), {.device = gpu.device});
  synchronize(0);
  const std::vector<float> got = output();
  for (int i = 0; i < count; ++i) ASSERT_EQ(got[i], input[count - 1 - i]) << i;
}

TEST_F(GpuLaunchTest, clusters) {
  if (gpu.arch < 90) GTEST_SKIP() << gpu.name << " has no clusters";
  Plan plan;
  plan.launches = {launch_of("cluster_size", 8, 32)};
  plan.launches[0].cluster = 4;
  load_kernel(plan, gpu)->launch(problem, plan, buffers(), {.device = gpu.device});
  synchronize(0);
  const std::vector<float> got = output();
  for (int i = 0; i < 8; ++i) EXPECT_EQ(got[i], 4.0f) << i;
}

TEST_F(GpuLaunchTest, the_drivers_view_of_tensor_maps) {
  if (gpu.arch < 90) GTEST_SKIP() << gpu.name << " has no tensor maps";
  const DeviceMemory tensor(0, 64 * 128 * 2);
  launch::TensorMapSpec spec{.data = tensor.data(), .dtype = Dtype::bfloat16, .rank = 2};
  spec.sizes[0] = 128, spec.sizes[1] = 64;
  spec.strides_bytes[0] = 256;
  spec.box[0] = 64, spec.box[1] = 64;
  const ContextScope scope(driver(), 0, nullptr);
  EXPECT_NE(tensor_map(driver(), spec).words[0], 0u);
  spec.strides_bytes[0] = 250;  // not a multiple of 16
  EXPECT_THROW(tensor_map(driver(), spec), Error);
}

TEST_F(GpuLaunchTest, the_callers_thread_has_no_context_afterwards_either) {
  Plan plan;
  plan.launches = {launch_of("scale", 4, 256)};
  load_kernel(plan, gpu)->launch(problem, plan, buffers(), {.device = gpu.device});
  Context current = nullptr;
  ASSERT_EQ(driver().CtxGetCurrent(&current), 0);
  EXPECT_EQ(current, nullptr);
}

TEST_F(GpuLaunchTest, more_memory_than_there_is) {
  try {
    DeviceMemory(0, std::size_t{1} << 50);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::out_of_memory);
    EXPECT_NE(std::string(error.what()).find("are free"), std::string::npos) << error.what();
  }
}

TEST_F(GpuLaunchTest, a_launch_the_gpu_cannot_take_is_an_error_with_its_name) {
  Plan plan;
  plan.launches = {launch_of("scale", 4, 256)};
  const auto kernel = load_kernel(plan, gpu);
  plan.launches[0].shared_bytes = 1 << 30;
  try {
    kernel->launch(problem, plan, buffers(), {.device = gpu.device});
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("cuLaunchKernelEx of demo/small: CUDA_ERROR_"), std::string::npos)
        << error.what();
  }
}

TEST_F(GpuLaunchTest, a_stream_of_another_gpu_is_refused) {
  if (devices().size() < 2) GTEST_SKIP() << "one GPU";
  Plan plan;
  plan.launches = {launch_of("scale", 4, 256)};
  const auto kernel = load_kernel(plan, gpu);
  const OwnedStream other(1);
  EXPECT_THROW(kernel->launch(problem, plan, buffers(), {.device = gpu.device, .stream = other.handle()}), Error);
}

}  // namespace
}  // namespace flash_attention::cuda
