// float32 on CUDA cores, for precision = ieee.

#include <algorithm>
#include <array>
#include <optional>

#include "plan/families/mma.h"
#include "plan/families/portable.h"
#include "plan/kernel_table.h"

namespace flash_attention::plan {
namespace {

std::string reject_problem(const Problem& problem, const DeviceInfo& device) {
  if (!has_fp32_products(problem)) return "needs float32 and precision = ieee";
  return reject_mma_problem(problem, device);
}

// Forward -------------------------------------------------------------------------------------------------------------

/// 32 rows a warp where so many fit in registers, else 16. H200, 2 x 4096 tokens, 1024 wide, TFLOP/s of 128 x 64, 128 x 32
/// and 64 x 32: 39.2, 37.0 and 26.2 with 64 columns; 128 x 32 and 64 x 32: 33.5 and 26.0 with 128, 25.2 and 22.0 with 256.
std::optional<MmaForwardTile> forward_tile(const Request& r) {
  const Problem& problem = r.problem;
  const std::int64_t dim = std::max(problem.head_dim, problem.head_dim_v);
  const bool wide_warps = !r.features.touches_scores() && dim <= 128;
  const MmaForwardTile small{64, 32, 4}, large{128, dim <= 64 ? 64 : 32, wide_warps ? 4 : 8};
  for (const MmaForwardTile& tile : {problem.seq_q <= 64 ? small : large, MmaForwardTile{128, 32, large.num_warps}, small}) {
    if (tile.shared_bytes(problem) <= r.device.shared_bytes) return tile;
  }
  return std::nullopt;
}

MmaForwardTile asked_tile(const Request& r, const TileSize& asked) {
  const auto [block_q, block_kv] = asked;
  const std::optional<MmaForwardTile> usual = forward_tile(r);
  const int rows = block_q == 128 && usual && usual->block_q / usual->num_warps == 32 ? 32 : 16;
  return {block_q, block_kv, block_q / rows};
}

std::string reject_forward_tile(const Request& r, const TileSize& asked) {
  const auto [block_q, block_kv] = asked;
  if (block_q != 32 && block_q != 64 && block_q != 128) return "allowed are 32, 64 and 128 queries";
  if (block_kv != 32 && block_kv != 64) return "allowed are 32 and 64 keys";
  return asked_tile(r, asked).reject_size(r.problem, r.device);
}

Answer plan_forward(const Request& r) {
  const Problem& problem = r.problem;
  if (std::string reason = reject_problem(problem, r.device); !reason.empty()) return Refusal{std::move(reason)};
  std::optional<MmaForwardTile> tile = forward_tile(r);
  if (!tile) return Refusal{"needs more shared memory"};
  if (r.tile) {
    const std::string reason = reject_forward_tile(r, *r.tile);
    if (!reason.empty()) return refuse_tile(*r.tile, reason);
    tile = asked_tile(r, *r.tile);
  }
  return Offer{lay_out_mma_forward(problem, *tile, "forward/fp32", "forward_fp32")};
}

// Backward ------------------------------------------------------------------------------------------------------------

/// The largest tile that fits, in shared memory and, where scores have options, in registers. H200, 2 x 4096 tokens, 1024
/// wide, TFLOP/s: 64 columns 36.7 with 128 x 128, 35.4 with 64 x 128, 30.6 with 64 x 64; 128 columns 36.4 and 34.1.
std::optional<MmaBackwardTile> backward_tile(const Request& r) {
  const Problem& problem = r.problem;
  if (r.features.touches_scores()) return first_that_fits({{64, 64, 2}, {64, 64, 1}}, problem, r.device);
  const bool narrow = std::max(problem.head_dim, problem.head_dim_v) <= 64;
  return first_that_fits({MmaBackwardTile{narrow ? 128 : 64, 128, 1}, {64, 128, 1}, {64, 64, 2}, {64, 64, 1}}, problem,
                         r.device);
}

constexpr MmaQueryTile query_tile{32};

Answer plan_backward(const Request& r) {
  const Problem& problem = r.problem;
  if (std::string reason = reject_problem(problem, r.device); !reason.empty()) return Refusal{std::move(reason)};
  const std::optional<MmaBackwardTile> tile = backward_tile(r);
  std::string reason = reject_mma_backward(problem, r.device, tile, query_tile);
  if (!reason.empty()) return Refusal{std::move(reason)};
  Plan plan = lay_out_mma_backward(problem, *tile, query_tile, {"backward/fp32", "backward/fp32", "backward_fp32"});
  add_bias_launch(problem, plan);
  add_program_and_sink_launches(problem, plan);
  return Offer{std::move(plan)};
}

}  // namespace

std::span<const KernelEntry> fp32_kernels() {
  static constexpr std::string_view requirements =
      "sm_80 and up, float32 with precision = ieee, strides that are multiples of 4, a positive scale";
  static const std::array<KernelEntry, 2> rows = mma_rows({.name = "forward/fp32",
                                                           .pass = Pass::forward,
                                                           .device = DeviceKind::cuda,
                                                           .requirements = requirements,
                                                           .proven = run_on_h200,
                                                           .plan = plan_forward},
                                                          {.name = "backward/fp32",
                                                           .pass = Pass::backward,
                                                           .device = DeviceKind::cuda,
                                                           .requirements = requirements,
                                                           .proven = run_on_h200,
                                                           .plan = plan_backward});
  return rows;
}

}  // namespace flash_attention::plan
