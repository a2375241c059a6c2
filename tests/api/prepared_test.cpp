#include "api/prepared.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "emulator/host/seed.h"
#include "flash_attention/attention.h"
#include "flash_attention/plan.h"
#include "flash_attention/planned_call.h"

namespace flash_attention::api {
namespace {

const Problem small{.seq_q = 40, .seq_kv = 40, .heads_q = 2, .heads_kv = 2, .head_dim = 16};

TEST(Prepared, TheKernelByNameIsTheOneThatWasNamed) {
  std::vector<std::string> names;
  for (const KernelSummary& kernel : kernels()) {
    if (kernel.device != DeviceKind::cpu || kernel.pass != Pass::forward) continue;
    try {
      make_plan(small, Pass::forward, device_info({}), kernel.name);
      names.push_back(kernel.name);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::unsupported);
    }
  }
  ASSERT_GT(names.size(), 2u);
  const std::string best = prepare(small, Pass::forward, {})->plan.kernel;
  for (int round = 0; round < 2; ++round) {  // each after another one, of this thread's last call and of the whole cache
    for (const std::string& name : names) {
      EXPECT_EQ(prepare(small, Pass::forward, {.kernel = name})->plan.kernel, name);
      EXPECT_EQ(prepare(small, Pass::forward, {})->plan.kernel, best);
    }
  }
}

TEST(Prepared, AnotherPassOrDeviceIsAnotherPlan) {
  for (int round = 0; round < 2; ++round) {
    for (const Pass pass : {Pass::forward, Pass::backward, Pass::standard_forward, Pass::standard_backward}) {
      EXPECT_EQ(prepare(small, pass, {})->plan.pass, pass);
    }
    for (const int arch : {80, 90}) {
      const Device device{.kind = DeviceKind::emulator, .emulated_arch = arch};
      const auto prepared = prepare(small, Pass::forward, {.device = device});
      EXPECT_EQ(prepared->device.arch, arch);
      EXPECT_EQ(prepared->device.device.kind, DeviceKind::emulator);
    }
  }
}

/// A test that changes the emulated GPU gets a plan for it, also for a problem that was planned before.
TEST(Prepared, AnotherNumberOfSmsIsAnotherPlan) {
  const Problem decode{.seq_q = 1, .seq_kv = 4000, .heads_q = 2, .heads_kv = 2, .head_dim = 64, .dtype = Dtype::bfloat16};
  const Options options{.device = {.kind = DeviceKind::emulator, .emulated_arch = 80}, .kernel = "decode/sm80"};
  for (int round = 0; round < 2; ++round) {
    for (const int sms : {3, 0, 5}) {
      emulator::set_num_sms(sms);
      const auto prepared = prepare(decode, Pass::forward, options);
      EXPECT_EQ(prepared->device.num_sms, sms > 0 ? sms : 108);
      EXPECT_EQ(prepared->plan, make_plan(decode, Pass::forward, device_info(options.device), options.kernel));
    }
  }
  emulator::set_num_sms(0);
}

/// Queries of 0 see all keys alike: a row of out is the mean of V, and lse the logarithm of their number.
TEST(Prepared, APlannedCallIsTheCallItsWorkspaceIsFor) {
  constexpr std::size_t rows = 40, columns = 2 * 16;
  const std::vector<float> zero(rows * columns, 0.0f);
  std::vector<float> v(rows * columns);
  for (std::size_t row = 0; row < rows; ++row) {
    for (std::size_t column = 0; column < columns; ++column)
      v[row * columns + column] = static_cast<float>(column) / 32 + (row % 2 == 0 ? 0.5f : -0.5f);
  }
  for (const Pass pass : {Pass::forward, Pass::standard_forward}) {
    std::vector<float> out(rows * columns), lse(2 * rows);
    const Buffers buffers{.q = zero.data(), .k = zero.data(), .v = v.data(), .out = out.data(), .lse = lse.data()};
    const PlannedCall call(small, pass);
    Options options{.workspace_bytes = call.workspace_bytes()};
    EXPECT_EQ(options.workspace_bytes, workspace_bytes(small, pass));
    EXPECT_TRUE(pass == Pass::forward || options.workspace_bytes > 0);
    if (options.workspace_bytes > 0) {
      EXPECT_THROW(call.run(buffers, {}), Error);
    }
    std::vector<std::byte> workspace(options.workspace_bytes + 256);
    options.workspace = workspace.data() + (256 - reinterpret_cast<std::uintptr_t>(workspace.data()) % 256);
    call.run(buffers, options);
    for (std::size_t i = 0; i < out.size(); ++i) EXPECT_NEAR(out[i], static_cast<float>(i % columns) / 32, 1e-6f);
    for (const float sum : lse) EXPECT_NEAR(sum, std::log(40.0f), 1e-6f);
  }
}

/// Every field of a Problem, changed alone: each makes another entry, and what comes back is for that problem.
TEST(Prepared, EveryFieldOfAProblemIsInTheKey) {
  using Change = std::function<void(Problem&)>;
  const std::vector<Change> changes = {
      [](Problem& p) { p.batch = 3; },
      [](Problem& p) { p.seq_q = 41; },
      [](Problem& p) { p.seq_kv = 41; },
      [](Problem& p) { p.heads_q = 4; },
      [](Problem& p) { p.heads_kv = 1; },
      [](Problem& p) { p.head_dim = 24; },
      [](Problem& p) { p.head_dim_v = 8; },
      [](Problem& p) { p.dtype = Dtype::bfloat16; },
      [](Problem& p) { p.scale = 0.5f; },
      [](Problem& p) { p.scale = -0.5f; },
      [](Problem& p) { p.softcap = 3; },
      [](Problem& p) { p.alibi = true; },
      [](Problem& p) { p.alibi = true, p.alibi_batch_stride = 2; },
      [](Problem& p) { p.causal = true; },
      [](Problem& p) { p.causal = true, p.alignment = Alignment::top_left; },
      [](Problem& p) { p.window_left = 3; },
      [](Problem& p) { p.window_right = 3; },
      [](Problem& p) { p.key_lengths = true; },
      [](Problem& p) { p.seqused_q = true; },
      [](Problem& p) { p.seqused_kv = true; },
      [](Problem& p) { p.sink = true; },
      [](Problem& p) { p.dropout_p = 0.25f; },
      [](Problem& p) { p.deterministic = true; },
      [](Problem& p) { p.invariant = true; },
      [](Problem& p) { p.mask = {.present = true, .q_stride = 40}; },
      [](Problem& p) { p.bias = {.present = true, .q_stride = 40}; },
      [](Problem& p) { p.bias = {.present = true, .dtype = Dtype::float16, .q_stride = 40}; },
      [](Problem& p) { p.bias = {.present = true, .head_stride = 1600, .q_stride = 40}; },
      [](Problem& p) { p.bias = {.present = true, .batch_stride = 3200, .head_stride = 1600, .q_stride = 40}; },
      [](Problem& p) { p.q_strides.seq = 64; },
      [](Problem& p) { p.k_strides.head = 64, p.k_strides.seq = 256; },
      [](Problem& p) { p.v_strides.batch = 99999; },
      [](Problem& p) { p.out_strides.seq = 64; },
      [](Problem& p) { p.packed = true, p.total_q = p.total_kv = 60; },
      [](Problem& p) { p.packed = true, p.total_q = 61, p.total_kv = 60; },
  };
  std::vector<Problem> problems{small};
  for (const Change& change : changes) change(problems.emplace_back(small));
  for (std::size_t a = 0; a < problems.size(); ++a) {
    for (std::size_t b = 0; b < a; ++b) EXPECT_FALSE(problems[a] == problems[b]) << a << " and " << b;
  }
  for (int round = 0; round < 2; ++round) {
    for (const Problem& problem : problems) {
      const auto prepared = prepare(problem, Pass::forward, {});
      EXPECT_EQ(prepared->plan, make_plan(problem, Pass::forward, device_info({}))) << to_string(problem);
      EXPECT_EQ(prepared->problem.alibi_batch_stride, problem.alibi_batch_stride);
      EXPECT_EQ(prepared->problem.window_left, problem.window_left);
      EXPECT_EQ(prepared->problem.softcap, problem.softcap);
      EXPECT_EQ(prepared->problem.bias, problem.bias);
    }
  }
}

}  // namespace
}  // namespace flash_attention::api
