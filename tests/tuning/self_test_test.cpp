#include "tuning/self_test.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <set>

#include "api/backends.h"
#include "api/checks/validate.h"
#include "flash_attention/error.h"
#include "plan/kernel_table.h"

namespace flash_attention::tuning {
namespace {

Machine machine(const Device& device) { return {device_info(device), api::backend_of(device)}; }

std::vector<Call> calls_of(Pass pass) {
  std::vector<Call> calls;
  for (const Problem& problem : hostile_problems(pass))
    calls.push_back({api::normalise(problem, pass), pass, api::normalise(problem, Pass::forward)});
  return calls;
}

/// Runs the kernels of the CPU, and then does something to what they wrote.
class Harmed final : public Kernel {
 public:
  using Harm = std::function<void(const Problem&, const Buffers&, int call)>;
  Harmed(std::unique_ptr<Kernel> kernel, Harm harm) : kernel_(std::move(kernel)), harm_(std::move(harm)) {}
  void launch(const Problem& problem, const Plan& plan, const Buffers& buffers, const Options& options) const override {
    kernel_->launch(problem, plan, buffers, options);
    harm_(problem, buffers, calls_++);
  }

 private:
  std::unique_ptr<Kernel> kernel_;
  Harm harm_;
  mutable int calls_ = 0;
};

plan::Verdict verdict_on_cpu(std::string_view kernel, Pass pass, const Harmed::Harm& harm) {
  const Machine cpu = machine({});
  const Load load = [&](const Problem& problem, const Plan& plan) -> std::unique_ptr<Kernel> {
    return std::make_unique<Harmed>(cpu.backend.load(problem, plan, cpu.device, nullptr), harm);
  };
  return self_test(kernel, pass, calls_of(pass), nullptr, "", cpu, cpu, load);
}

TEST(SelfTest, passes_right_kernels_and_fails_planted_ones) {
  const auto nothing = [](const Problem&, const Buffers&, int) {};
  EXPECT_EQ(verdict_on_cpu("cpu/prefill", Pass::forward, nothing).reason, "");
  EXPECT_TRUE(verdict_on_cpu("cpu/decode", Pass::forward, nothing).passed);
  EXPECT_TRUE(verdict_on_cpu("cpu/backward", Pass::backward, nothing).passed);

  const auto first = [](void* tensor, Dtype dtype, auto value) {  // its first element
    if (dtype == Dtype::float32)
      *static_cast<float*>(tensor) = static_cast<float>(value);
    else
      *static_cast<std::uint16_t*>(tensor) = 0x7fff;  // NaN in both 16-bit types
  };
  const auto nan_in_out = [&](const Problem& p, const Buffers& b, int) { first(b.out, p.dtype, NAN); };
  const auto wrong_lse = [](const Problem&, const Buffers& b, int) { b.lse[3] += 0.1f; };
  const auto rarely = [&](const Problem& p, const Buffers& b, int call) {  // a race
    if (call == 1) first(b.out, p.dtype, NAN);
  };
  const auto empty_rows = [](const Problem& p, const Buffers& b, int) {  // rows that see nothing are 0
    if (p.seq_q > p.seq_kv && p.window_right == 0) static_cast<std::uint16_t*>(b.out)[5] = 0x3c00;
  };
  const auto fails = [](const Problem&, const Buffers&, int) {
    throw Error(ErrorCode::device_failed, "illegal address\nlog");
  };
  for (const auto& harm : std::vector<Harmed::Harm>{nan_in_out, wrong_lse, rarely, empty_rows}) {
    const plan::Verdict verdict = verdict_on_cpu("cpu/prefill", Pass::forward, harm);
    EXPECT_FALSE(verdict.passed);
    EXPECT_NE(verdict.reason, "");
  }
  EXPECT_EQ(verdict_on_cpu("cpu/prefill", Pass::forward, fails).reason, "illegal address");
  const auto wrong_dk = [&](const Problem& p, const Buffers& b, int) { first(b.dk, p.dtype, 3); };
  EXPECT_FALSE(verdict_on_cpu("cpu/backward", Pass::backward, wrong_dk).passed);
}

/// Without a compiler, or memory, nothing is known of the kernel.
TEST(SelfTest, does_not_blame_the_kernel_for_a_missing_compiler) {
  const auto missing = [](const Problem&, const Buffers&, int) { throw Error(ErrorCode::unavailable, "no NVRTC"); };
  EXPECT_THROW(verdict_on_cpu("cpu/prefill", Pass::forward, missing), Error);
}

/// Each kernel that may be unproven somewhere takes some of the problems.
TEST(SelfTest, every_kernel_of_a_gpu_is_tested) {
  for (const plan::KernelEntry& entry : plan::kernel_table()) {
    if (!device_traits(entry.device).gpu_kernels || !entry.automatic || plan::is_last_resort(entry)) continue;
    // For GPUs that nobody has run: their first user's GPU tests them.
    const bool unproven = entry.name == "forward/sm89_fp8" || entry.name == "forward/sm100";
    EXPECT_EQ(entry.proven.empty(), unproven) << entry.name;
    // Takes lists of keys alone, which the self-test has none of. It runs on sm_90 alone, where it is proven.
    if (entry.name == "backward/mla_sm90") continue;
    int taken = 0;
    for (const Call& call : calls_of(entry.pass)) {
      for (const int arch : {90, 100})
        taken +=
            plan::plan_choice(call.problem, entry.pass, typical_gpu(arch), {.kernel = std::string(entry.name)}).has_value();
    }
    EXPECT_GE(taken, 1) << entry.name;
  }
}

/// In the emulator, kernels of sm_80, which were never run there: the smallest of the problems.
TEST(SelfTest, runs_gpu_kernels) {
  const Machine cpu = machine({}), emulator = machine({.kind = DeviceKind::emulator, .emulated_arch = 80});
  std::vector<Call> one{calls_of(Pass::forward)[1]};
  const auto load = [&](bool wrong) -> Load {
    return [&, wrong](const Problem& problem, const Plan& plan) -> std::unique_ptr<Kernel> {
      auto kernel = emulator.backend.load(problem, plan, emulator.device, nullptr);
      if (!wrong) return kernel;
      return std::make_unique<Harmed>(std::move(kernel), [](const Problem&, const Buffers& b, int) { b.lse[200] += 0.1f; });
    };
  };
  EXPECT_EQ(self_test("forward/sm80", Pass::forward, one, nullptr, "", emulator, cpu, load(false)).reason, "");
  const plan::Verdict verdict = self_test("forward/sm80", Pass::forward, one, nullptr, "", emulator, cpu, load(true));
  EXPECT_FALSE(verdict.passed);
  EXPECT_TRUE(verdict.reason.starts_with("lse[200] is ")) << verdict.reason;
}

}  // namespace
}  // namespace flash_attention::tuning
