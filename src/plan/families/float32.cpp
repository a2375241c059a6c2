// float32 in two families: tf32 on tensor cores, for every precision but ieee, and fp32 on CUDA cores, for ieee. Their
// plans have the same parts and different tiles.

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <string_view>

#include "plan/families/mma.h"
#include "plan/families/portable.h"
#include "plan/kernel_table.h"

namespace flash_attention::plan {
namespace {

struct Family {
  std::string_view name;          // of forward/NAME and backward/NAME
  std::string_view requirements;  // of both
  int fewest_keys;                // of a forward tile
  std::string (*reject)(const Problem& problem);
  std::optional<MmaForwardTile> (*forward_tile)(const Request& request);
  std::optional<MmaBackwardTile> (*backward_tile)(const Request& request);
};

std::string reject_problem(const Family& family, const Request& r) {
  if (std::string reason = family.reject(r.problem); !reason.empty()) return reason;
  return reject_mma_problem(r.problem, r.device);
}

/// A requested tile. It has 32 rows a warp if the planner's own choice may have them.
MmaForwardTile requested_tile(const Family& family, const Request& r, const TileSize& tile) {
  const std::optional<MmaForwardTile> usual = family.forward_tile(r);
  const int rows = tile.block_q == 128 && usual && usual->block_q / usual->num_warps == 32 ? 32 : 16;
  return {tile.block_q, tile.block_kv, tile.block_q / rows};
}

std::string reject_forward_tile(const Family& family, const Request& r, const TileSize& tile) {
  const auto [block_q, block_kv] = tile;
  if (block_q != 32 && block_q != 64 && block_q != 128) return "allowed are 32, 64 and 128 queries";
  if (block_kv < family.fewest_keys || (block_kv != 16 && block_kv != 32 && block_kv != 64)) {
    return family.fewest_keys == 16 ? "allowed are 16, 32 and 64 keys" : "allowed are 32 and 64 keys";
  }
  return requested_tile(family, r, tile).reject_size(r.problem, r.device);
}

template <const Family& family>
Answer plan_forward(const Request& r) {
  if (std::string reason = reject_problem(family, r); !reason.empty()) return Refusal{std::move(reason)};
  std::optional<MmaForwardTile> tile = family.forward_tile(r);
  if (!tile) return Refusal{"needs more shared memory"};
  if (r.tile) {
    const std::string reason = reject_forward_tile(family, r, *r.tile);
    if (!reason.empty()) return refuse_tile(*r.tile, reason);
    tile = requested_tile(family, r, *r.tile);
  }
  const std::string name(family.name);
  return Offer{lay_out_mma_forward(r.problem, *tile, "forward/" + name, "forward_" + name)};
}

template <const Family& family>
Answer plan_backward(const Request& r) {
  constexpr MmaQueryTile query_tile{32};
  const Problem& problem = r.problem;
  if (std::string reason = reject_problem(family, r); !reason.empty()) return Refusal{std::move(reason)};
  const std::optional<MmaBackwardTile> tile = family.backward_tile(r);
  std::string reason = reject_mma_backward(problem, r.device, tile, query_tile);
  if (!reason.empty()) return Refusal{std::move(reason)};
  const std::string name(family.name), unit = "backward/" + name;
  Plan plan = lay_out_mma_backward(problem, *tile, query_tile, {unit, unit, "backward_" + name});
  add_bias_launch(problem, plan);
  add_program_and_sink_launches(problem, plan);
  return Offer{std::move(plan)};
}

template <const Family& family>
std::array<KernelEntry, 2> rows_of(std::string_view forward, std::string_view backward) {
  return mma_rows({.name = forward,
                   .pass = Pass::forward,
                   .device = DeviceKind::cuda,
                   .requirements = family.requirements,
                   .proven = run_on_h200,
                   .plan = plan_forward<family>},
                  {.name = backward,
                   .pass = Pass::backward,
                   .device = DeviceKind::cuda,
                   .requirements = family.requirements,
                   .proven = run_on_h200,
                   .plan = plan_backward<family>});
}

// tf32 ----------------------------------------------------------------------------------------------------------------

std::string reject_tf32(const Problem& problem) {
  if (problem.dtype != Dtype::float32) return "needs float32";
  return problem.precision == Precision::ieee ? "precision = ieee" : "";
}

/// 32 rows a warp if they fit in registers, otherwise 16. With 64 keys registers would spill, and a key would not need
/// fewer instructions.
std::optional<MmaForwardTile> tf32_forward_tile(const Request& r) {
  const Problem& problem = r.problem;
  const bool wide_warps = !r.features.touches_scores() && std::max(problem.head_dim, problem.head_dim_v) <= 128;
  const MmaForwardTile small{64, 32, 4}, large{128, 32, wide_warps ? 4 : 8};
  for (const MmaForwardTile& tile : {problem.seq_q <= 64 ? small : large, small, MmaForwardTile{64, 16, 4}}) {
    if (tile.shared_bytes(problem) <= r.device.shared_bytes) return tile;
  }
  return std::nullopt;
}

/// The largest tile whose operands fit in shared memory. With 128 keys a score takes a third fewer instructions than
/// with 64.
std::optional<MmaBackwardTile> tf32_backward_tile(const Request& r) {
  const bool wide = !r.features.touches_scores() && std::max(r.problem.head_dim, r.problem.head_dim_v) <= 64;
  return first_that_fits({MmaBackwardTile{64, wide ? 128 : 64, 2}, {64, 64, 2}, {64, 64, 1}}, r.problem, r.device);
}

constexpr Family tf32{
    .name = "tf32",
    .requirements = "sm_80 and up, float32 unless precision = ieee, strides that are multiples of 4, a positive scale",
    .fewest_keys = 16,
    .reject = reject_tf32,
    .forward_tile = tf32_forward_tile,
    .backward_tile = tf32_backward_tile};

// fp32 ----------------------------------------------------------------------------------------------------------------

std::string reject_fp32(const Problem& problem) {
  return has_fp32_products(problem) ? "" : "needs float32 and precision = ieee";
}

/// 32 rows a warp if they fit in registers, otherwise 16. H200, 2 x 4096 tokens, 1024 wide, TFLOP/s of 128 x 64, 128 x
/// 32 and 64 x 32: 39.2, 37.0 and 26.2 with 64 columns; 128 x 32 and 64 x 32: 33.5 and 26.0 with 128, 25.2 and 22.0
/// with 256.
std::optional<MmaForwardTile> fp32_forward_tile(const Request& r) {
  const Problem& problem = r.problem;
  const std::int64_t dim = std::max(problem.head_dim, problem.head_dim_v);
  const bool wide_warps = !r.features.touches_scores() && dim <= 128;
  const MmaForwardTile small{64, 32, 4}, large{128, dim <= 64 ? 64 : 32, wide_warps ? 4 : 8};
  for (const MmaForwardTile& tile :
       {problem.seq_q <= 64 ? small : large, MmaForwardTile{128, 32, large.num_warps}, small}) {
    if (tile.shared_bytes(problem) <= r.device.shared_bytes) return tile;
  }
  return std::nullopt;
}

/// The largest tile that fits in shared memory and, if scores have options, in registers. H200, 2 x 4096 tokens, 1024
/// wide, TFLOP/s: 64 columns 36.7 with 128 x 128, 35.4 with 64 x 128, 30.6 with 64 x 64; 128 columns 36.4 and 34.1.
std::optional<MmaBackwardTile> fp32_backward_tile(const Request& r) {
  const Problem& problem = r.problem;
  if (r.features.touches_scores()) return first_that_fits({{64, 64, 2}, {64, 64, 1}}, problem, r.device);
  const bool narrow = std::max(problem.head_dim, problem.head_dim_v) <= 64;
  return first_that_fits({MmaBackwardTile{narrow ? 128 : 64, 128, 1}, {64, 128, 1}, {64, 64, 2}, {64, 64, 1}}, problem,
                         r.device);
}

constexpr Family fp32{
    .name = "fp32",
    .requirements = "sm_80 and up, float32 with precision = ieee, strides that are multiples of 4, a positive scale",
    .fewest_keys = 32,
    .reject = reject_fp32,
    .forward_tile = fp32_forward_tile,
    .backward_tile = fp32_backward_tile};

}  // namespace

std::span<const KernelEntry> tf32_kernels() {
  static const std::array<KernelEntry, 2> rows = rows_of<tf32>("forward/tf32", "backward/tf32");
  return rows;
}

std::span<const KernelEntry> fp32_kernels() {
  static const std::array<KernelEntry, 2> rows = rows_of<fp32>("forward/fp32", "backward/fp32");
  return rows;
}

}  // namespace flash_attention::plan
