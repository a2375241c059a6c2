#include <array>

#include "plan/families/cpu_tiles.h"
#include "plan/ladder/ladder.h"

// The ladder's four steps on the CPU: src/cpu/ladder/.

namespace flash_attention::plan {
namespace {

constexpr std::string_view requirements = "a step of the CPU ladder: float32, dense, causal or not, head_dim to 128";

std::string reject(const Problem& problem, const DeviceInfo&) {
  if (problem.dtype != Dtype::float32) return "the CPU ladder takes float32, not " + std::string(to_string(problem.dtype));
  return reject_for_all_rungs(problem);
}

/// The workspace is one row of scores.
Plan lay_out_scalar(const Problem& problem, const DeviceInfo&) {
  return {.block_q = 1, .block_kv = 1, .workspace_bytes = static_cast<std::size_t>(problem.seq_kv) * sizeof(float)};
}

Plan lay_out_blocked(const Problem&, const DeviceInfo&) { return {.block_q = 32, .block_kv = cpu_block_kv}; }

Plan lay_out_vectors(const Problem&, const DeviceInfo& device) {
  return {.block_q = cpu_block_q(device.isa), .block_kv = cpu_block_kv};
}

constexpr KernelEntry step(std::string_view name, Plan (*lay_out)(const Problem&, const DeviceInfo&)) {
  return {.name = name,
          .pass = Pass::forward,
          .device = DeviceKind::cpu,
          .requirements = requirements,
          .automatic = false,
          .reject = reject,
          .lay_out = lay_out};
}

constexpr std::array steps{step("ladder/c0_scalar", lay_out_scalar), step("ladder/c1_blocked", lay_out_blocked),
                           step("ladder/c2_simd", lay_out_vectors), step("ladder/c3_threads", lay_out_vectors)};

}  // namespace

std::span<const KernelEntry> cpu_ladder_kernels() { return steps; }

}  // namespace flash_attention::plan
