#include <array>

#include "plan/families/cpu_tiles.h"
#include "plan/ladder/ladder.h"

// The ladder's four steps on the CPU: src/cpu/ladder/.

namespace flash_attention::plan {
namespace {

constexpr std::string_view requirements = "a step of the CPU ladder: float32, dense, causal or not, head_dim to 128";

std::string reject(const Request& r) {
  const Problem& problem = r.problem;
  if (problem.dtype != Dtype::float32) return "the CPU ladder takes float32, not " + std::string(to_string(problem.dtype));
  return reject_for_all_rungs(r);
}

/// The workspace is one row of scores.
Answer plan_scalar(const Request& r) {
  const auto bytes = static_cast<std::size_t>(r.problem.seq_kv) * sizeof(float);
  return offer_unless(reject(r), [&] { return Plan{.block_q = 1, .block_kv = 1, .workspace_bytes = bytes}; });
}

Answer plan_blocked(const Request& r) {
  return offer_unless(reject(r), [] { return Plan{.block_q = 32, .block_kv = cpu_block_kv}; });
}

Answer plan_vectors(const Request& r) {
  return offer_unless(reject(r), [&] { return Plan{.block_q = cpu_block_q(r.device.isa), .block_kv = cpu_block_kv}; });
}

constexpr KernelEntry step(std::string_view name, Answer (*plan)(const Request&)) {
  return {.name = name,
          .pass = Pass::forward,
          .device = DeviceKind::cpu,
          .requirements = requirements,
          .automatic = false,
          .plan = plan};
}

constexpr std::array steps{step("ladder/c0_scalar", plan_scalar), step("ladder/c1_blocked", plan_blocked),
                           step("ladder/c2_simd", plan_vectors), step("ladder/c3_threads", plan_vectors)};

}  // namespace

std::span<const KernelEntry> cpu_ladder_kernels() { return steps; }

}  // namespace flash_attention::plan
