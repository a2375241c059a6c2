#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <new>
#include <thread>

#include "cuda/backend.h"
#include "cuda/fake_environment.h"
#include "cuda/memory.h"
#include "flash_attention/attention.h"
#include "flash_attention/error.h"
#include "flash_attention/runtime.h"
#include "jit/compile.h"

namespace {
std::atomic<long> num_allocations{0};
}

// Counts every allocation of this program.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  ++num_allocations;
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
// The standard library may take it for its buffers: memory of malloc, too, since what frees it is below.
[[gnu::noinline]] void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  ++num_allocations;
  return std::malloc(bytes == 0 ? 1 : bytes);
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace flash_attention::cuda {
namespace {

using namespace std::chrono_literals;
using testing::error_of;
using testing::fake_context;
using testing::fake_stream;
using testing::FakeCudaTest;

/// Two launches of kernels the library has; what they are is of no matter here.
Plan plan_of(const std::string& config) {
  Plan plan;
  plan.kernel = "forward/portable";
  const Launch first{.unit = "forward/portable",
                     .entry = "first",
                     .config = config,
                     .grid = {7, 2, 3},
                     .block = 256,
                     .shared_bytes = 50000};
  const Launch second{
      .unit = "forward/portable", .entry = "second", .config = config, .grid = {8, 1, 1}, .block = 128, .cluster = 2};
  plan.launches = {first, second};
  return plan;
}

DeviceInfo gpu(int index) {
  DeviceInfo info;
  info.device = {DeviceKind::cuda, index, 0};
  info.arch = 90;
  return info;
}

const Problem problem{.batch = 2,
                      .seq_q = 33,
                      .seq_kv = 44,
                      .heads_q = 6,
                      .heads_kv = 3,
                      .head_dim = 64,
                      .head_dim_v = 64,
                      .dtype = Dtype::bfloat16,
                      .q_strides = {1, 2, 3},
                      .k_strides = {4, 5, 6},
                      .v_strides = {7, 8, 9},
                      .out_strides = {10, 11, 12},
                      .scale = 0.5f};

const Buffers buffers{.q = reinterpret_cast<void*>(0x100),
                      .k = reinterpret_cast<void*>(0x200),
                      .v = reinterpret_cast<void*>(0x300),
                      .out = reinterpret_cast<void*>(0x400),
                      .lse = reinterpret_cast<float*>(0x500)};

class KernelTest : public FakeCudaTest {};

TEST_F(KernelTest, loading_and_allocating_leave_a_capture_of_another_thread_alone) {
  cu.captured_globally_elsewhere = true;
  for (const int mode : {0, 1, 2}) {
    cu.capture_mode = mode;
    const auto kernel = load_kernel(plan_of("undisturbed " + std::to_string(mode)), gpu(1));
    { const DeviceMemory memory(1, 100); }
    EXPECT_EQ(cu.capture_mode, mode) << "what the caller had set comes back";
  }
  EXPECT_EQ(cu.broke_capture, std::vector<std::string>{});
  EXPECT_GE(times_called("cuLibraryLoadData"), 6);
  EXPECT_EQ(times_called("cuMemAlloc"), 3);
  EXPECT_EQ(times_called("cuMemFree"), 3);
}

TEST_F(KernelTest, a_failed_load_gives_the_capture_mode_back) {
  cu.failures["cuLibraryLoadData"] = 1;
  error_of(ErrorCode::device_failed, [] { load_kernel(plan_of("mode after a failure"), gpu(0)); });
  EXPECT_EQ(cu.capture_mode, 0);
}

TEST_F(KernelTest, launches_in_order_with_the_same_arguments) {
  const Plan plan = plan_of("order");
  const auto kernel = load_kernel(plan, gpu(0));
  kernel->launch(problem, plan, buffers, {.device = gpu(0).device, .stream = fake_stream(0)});
  ASSERT_EQ(cu.launches.size(), 2u);
  const auto& [first, second] = std::tie(cu.launches[0], cu.launches[1]);
  EXPECT_EQ(std::vector<unsigned>(first.grid, first.grid + 3), (std::vector<unsigned>{7, 2, 3}));
  EXPECT_EQ(first.block, 256u);
  EXPECT_EQ(first.shared_bytes, 50000u);
  EXPECT_EQ(first.cluster, 0u);
  EXPECT_EQ(first.stream, fake_stream(0));
  EXPECT_EQ(second.block, 128u);
  EXPECT_EQ(second.cluster, 2u);
  for (const auto& launch : cu.launches) {
    EXPECT_EQ(launch.args.Q.data, buffers.q);
    EXPECT_EQ(launch.args.O.data, buffers.out);
    EXPECT_EQ(launch.args.lse, buffers.lse);
    EXPECT_EQ(launch.args.K.seq_stride, 5);
    EXPECT_EQ(launch.args.seq_kv, 44);
    EXPECT_EQ(launch.args.group, 2);
    EXPECT_EQ(launch.args.scale, 0.5f);
  }
}

TEST_F(KernelTest, the_plans_bytes_of_the_workspace_are_zeroed_and_no_others) {
  Plan plan = plan_of("zeroed");
  plan.zeroed_bytes = 4;
  std::vector<unsigned char> workspace(16, 0xff);
  const Options options{.device = gpu(0).device, .stream = fake_stream(0), .workspace = workspace.data()};
  load_kernel(plan, gpu(0))->launch(problem, plan, buffers, options);
  for (std::size_t byte = 0; byte < workspace.size(); ++byte) EXPECT_EQ(workspace[byte], byte < 4 ? 0 : 0xff) << byte;
}

TEST_F(KernelTest, a_prepared_mask_takes_the_place_of_the_first_launch) {
  Plan plan = plan_of("prepared");
  for (Launch& launch : plan.launches) launch.programmatic_launch = true;
  plan.workspace_offsets[1] = 16, plan.workspace_offsets[8] = 512;
  plan.workspace_bytes = 1024;
  plan.mask = {.present = true, .begin = 512, .zeroed_bytes = 4};
  std::vector<unsigned char> workspace(16, 0xff), kept(1024);
  const Options options{
      .device = gpu(0).device, .stream = fake_stream(0), .workspace = workspace.data(), .prepared_mask = {kept.data(), 1}};
  load_kernel(plan, gpu(0))->launch(problem, plan, buffers, options);
  ASSERT_EQ(cu.launches.size(), 1u);
  EXPECT_EQ(cu.launches[0].block, 128u);
  EXPECT_FALSE(cu.launches[0].early) << "nothing of this call came before";
  for (std::size_t byte = 0; byte < workspace.size(); ++byte) EXPECT_EQ(workspace[byte], byte < 4 ? 0 : 0xff) << byte;
  const abi::AttentionArgs& args = cu.launches[0].args;
  EXPECT_EQ(args.workspace, workspace.data());
  EXPECT_EQ(args.workspace_offsets[1], 16);
  EXPECT_EQ(static_cast<unsigned char*>(args.workspace) + args.workspace_offsets[8], kept.data() + 256);
}

TEST_F(KernelTest, code_is_for_the_gpus_architecture_and_shared_memory_is_announced) {
  load_kernel(plan_of("attributes"), gpu(1));
  ASSERT_EQ(cu.loaded.size(), 2u);
  EXPECT_NE(cu.loaded[0].find("--gpu-architecture=sm_90a"), std::string::npos) << cu.loaded[0];
  ASSERT_EQ(cu.attributes.size(), 2u);
  EXPECT_EQ(cu.attributes[0].which, 8);
  EXPECT_EQ(cu.attributes[0].value, 50000);
  EXPECT_EQ(cu.attributes[0].device, 1);
}

TEST_F(KernelTest, a_kernel_is_loaded_once_for_all_plans_and_gpus) {
  const Plan plan = plan_of("once");
  load_kernel(plan, gpu(0));
  load_kernel(plan, gpu(0));
  load_kernel(plan, gpu(1));
  EXPECT_EQ(cu.loaded.size(), 2u);
  EXPECT_EQ(cu.attributes.size(), 4u) << "each GPU is told about shared memory, once";
}

TEST_F(KernelTest, a_launch_with_more_shared_memory_raises_the_limit) {
  Plan plan = plan_of("more");
  load_kernel(plan, gpu(0));
  plan.launches[0].shared_bytes = 60000;
  load_kernel(plan, gpu(0));
  plan.launches[0].shared_bytes = 10000;
  load_kernel(plan, gpu(0));
  ASSERT_EQ(cu.attributes.size(), 3u);
  EXPECT_EQ(cu.attributes.back().value, 60000);
}

TEST_F(KernelTest, a_kernel_that_sms_divide_their_memory_for_in_two_ways_is_loaded_twice) {
  Plan plan = plan_of("divided");
  load_kernel(plan, gpu(0));
  const std::size_t loaded = cu.loaded.size();
  for (Launch& launch : plan.launches) launch.prefer_shared_carveout = true;
  load_kernel(plan, gpu(0));
  EXPECT_EQ(cu.loaded.size(), 2 * loaded);
  EXPECT_EQ(cu.attributes.back().which, 9);
  EXPECT_EQ(cu.attributes.back().value, 100);
  load_kernel(plan, gpu(0));
  load_kernel(plan_of("divided"), gpu(0));
  EXPECT_EQ(cu.loaded.size(), 2 * loaded) << "either is kept";
}

TEST_F(KernelTest, without_a_context_the_primary_one_is_used_and_taken_back) {
  const Plan plan = plan_of("context");
  load_kernel(plan, gpu(1))->launch(problem, plan, buffers, {.device = gpu(1).device});
  ASSERT_EQ(cu.launches.size(), 2u);
  EXPECT_EQ(cu.launches[0].device, 1);
  EXPECT_TRUE(cu.contexts.empty());
}

TEST_F(KernelTest, the_callers_context_is_used_where_it_is_of_the_gpu) {
  const Plan plan = plan_of("context");
  cu.contexts = {fake_context(0)};
  load_kernel(plan, gpu(0))->launch(problem, plan, buffers, {.device = gpu(0).device});
  EXPECT_EQ(times_called("cuCtxPushCurrent"), 0);
  EXPECT_EQ(cu.launches[0].device, 0);
}

TEST_F(KernelTest, the_callers_context_of_another_gpu_comes_back_afterwards) {
  const Plan plan = plan_of("context");
  cu.contexts = {fake_context(0)};
  load_kernel(plan, gpu(1))->launch(problem, plan, buffers, {.device = gpu(1).device});
  EXPECT_EQ(cu.launches[0].device, 1);
  EXPECT_EQ(cu.contexts, std::vector<void*>{fake_context(0)});
}

TEST_F(KernelTest, a_stream_of_another_gpu_is_refused_and_nothing_is_launched) {
  const Plan plan = plan_of("stream");
  const auto kernel = load_kernel(plan, gpu(0));
  const auto text = error_of(ErrorCode::invalid_argument, [&] {
    kernel->launch(problem, plan, buffers, {.device = gpu(0).device, .stream = fake_stream(1)});
  });
  EXPECT_NE(text.find("stream: it belongs to cuda:1, the call is for cuda:0"), std::string::npos) << text;
  EXPECT_TRUE(cu.launches.empty());
}

TEST_F(KernelTest, nothing_is_compiled_or_loaded_while_the_stream_is_captured) {
  const Plan plan = plan_of("capture");
  cu.capturing = true;
  const auto text = error_of(ErrorCode::unavailable, [&] { load_kernel(plan, gpu(0), fake_stream(0)); });
  EXPECT_NE(text.find("forward/portable first sm_90a capture is not loaded yet"), std::string::npos) << text;
  EXPECT_NE(text.find("prewarm"), std::string::npos) << text;
  EXPECT_TRUE(cu.loaded.empty());
  EXPECT_TRUE(cu.contexts.empty());

  cu.capturing = false;
  load_kernel(plan, gpu(0), fake_stream(0));
  cu.capturing = true;
  const auto kernel = load_kernel(plan, gpu(0), fake_stream(0));
  cu.calls.clear();
  kernel->launch(problem, plan, buffers, {.device = gpu(0).device, .stream = fake_stream(0)});
  EXPECT_EQ(cu.launches.size(), 2u);
  EXPECT_EQ(times_called("cuStreamSynchronize"), 0);
  EXPECT_EQ(times_called("cuMemAlloc"), 0);
}

TEST_F(KernelTest, an_empty_grid_is_not_launched) {
  Plan plan = plan_of("empty");
  plan.launches[0].grid = {0, 2, 3};
  load_kernel(plan, gpu(0))->launch(problem, plan, buffers, {.device = gpu(0).device});
  ASSERT_EQ(cu.launches.size(), 1u);
  EXPECT_EQ(cu.launches[0].block, 128u);
}

TEST_F(KernelTest, failures_name_the_call_the_kernel_and_the_next_step) {
  const Plan plan = plan_of("failures");
  cu.failures["cuLibraryLoadData"] = 209;
  auto text = error_of(ErrorCode::unavailable, [&] { load_kernel(plan, gpu(0)); });
  EXPECT_NE(text.find("update the driver"), std::string::npos) << text;
  cu.failures.clear();
  const auto kernel = load_kernel(plan, gpu(0));
  cu.failures["cuLaunchKernelEx"] = 701;
  text = error_of(ErrorCode::device_failed, [&] { kernel->launch(problem, plan, buffers, {.device = gpu(0).device}); });
  EXPECT_NE(
      text.find("cuLaunchKernelEx of forward/portable: CUDA_ERROR_FAKE (701): as the test asked; the launch needs more"),
      std::string::npos)
      << text;
  EXPECT_TRUE(cu.contexts.empty()) << "the primary context is taken back after a failure too";
}

TEST_F(KernelTest, a_plan_with_other_launches_is_our_own_mistake) {
  Plan plan = plan_of("launches");
  const auto kernel = load_kernel(plan, gpu(0));
  plan.launches.pop_back();
  error_of(ErrorCode::internal, [&] { kernel->launch(problem, plan, buffers, {.device = gpu(0).device}); });
}

TEST_F(KernelTest, prewarmed_in_the_background_then_captured) {
  const Problem whole{.batch = 1, .seq_q = 64, .seq_kv = 64, .head_dim = 64, .dtype = Dtype::float16};
  {
    std::string name = "forward/portable";
    const Options options{.device = gpu(0).device, .stream = fake_stream(0), .kernel = name};
    auto done = prewarm_in_background(whole, Pass::forward, options);
    name = "gone by now     ";
    done.get();
  }
  EXPECT_EQ(cu.loaded.size(), 1u);
  EXPECT_TRUE(cu.launches.empty());
  cu.capturing = true;
  const auto block = [](std::uintptr_t i) { return reinterpret_cast<void*>(i << 24); };
  forward(whole, {.q = block(1), .k = block(2), .v = block(3), .out = block(4)},
          {.device = gpu(0).device, .stream = fake_stream(0), .kernel = "forward/portable"});
  EXPECT_EQ(cu.launches.size(), 1u);
}

// Nobody calls backward: its kernels are ready a moment after a forward that says it will follow, and not before.
TEST_F(KernelTest, a_first_forward_compiles_what_backward_needs) {
  Problem whole{.batch = 1, .seq_q = 64, .seq_kv = 64, .head_dim = 64, .dtype = Dtype::bfloat16};
  const Plan later = make_plan(whole, Pass::backward, device_info(gpu(0).device));
  const auto num_compiled = [&] {
    return std::ranges::count_if(later.launches, [&](const Launch& launch) {
      return jit::find_compiled(jit::make_key(launch, device_info(gpu(0).device).arch)) != nullptr;
    });
  };
  const auto all = static_cast<std::ptrdiff_t>(later.launches.size());
  const auto block = [](std::uintptr_t i) { return reinterpret_cast<void*>(i << 24); };
  const Buffers memory{.q = block(1), .k = block(2), .v = block(3), .out = block(4), .lse = static_cast<float*>(block(5))};
  Options options{.device = gpu(0).device, .stream = fake_stream(0)};
  forward(whole, memory, options);
  EXPECT_EQ(num_compiled(), 0);
  whole.batch = 2;  // another problem, whose kernels are the same
  options.backward_follows = true;
  forward(whole, memory, options);
  for (int tenths = 0; num_compiled() < all && tenths < 100; ++tenths) std::this_thread::sleep_for(100ms);
  EXPECT_EQ(num_compiled(), all);
}

TEST_F(KernelTest, a_mistake_in_a_background_prewarm_comes_out_of_its_future) {
  auto done = prewarm_in_background({.seq_q = 1, .seq_kv = 1, .head_dim = 64}, Pass::forward,
                                    {.device = gpu(0).device, .kernel = "forward/none"});
  EXPECT_THROW(done.get(), Error);
}

TEST_F(KernelTest, a_repeated_call_allocates_nothing) {
  Problem whole{
      .batch = 1, .seq_q = 128, .seq_kv = 128, .heads_q = 2, .heads_kv = 2, .head_dim = 64, .dtype = Dtype::float32};
  const Options options{.device = gpu(0).device, .stream = fake_stream(0), .kernel = "forward/portable"};
  const auto block = [](std::uintptr_t i) { return reinterpret_cast<void*>(i << 24); };
  const Buffers memory{.q = block(1), .k = block(2), .v = block(3), .out = block(4), .lse = static_cast<float*>(block(5))};
  forward(whole, memory, options);
  EXPECT_GE(cu.launches.size(), 1u);
  cu.quiet = true;
  const long before = num_allocations;
  for (int i = 0; i < 10; ++i) forward(whole, memory, options);
  EXPECT_EQ(num_allocations - before, 0);
  EXPECT_EQ(cu.num_launches, 11 * cu.launches.size());
}

}  // namespace
}  // namespace flash_attention::cuda
