#include <algorithm>
#include <array>
#include <optional>

#include "abi/forward_sm80.h"
#include "plan/families/mma.h"
#include "plan/families/sm90.h"
#include "plan/families/portable.h"
#include "plan/kernel_config.h"
#include "plan/kernel_table.h"
#include "support/ceil_div.h"

namespace flash_attention::plan {
namespace {

std::string reject_problem(const Problem& problem, const DeviceInfo& device, std::int64_t max_dim = 256) {
  if (device.arch >= 80 && problem.dtype == Dtype::float32) return "needs a 16-bit dtype";
  return reject_mma_problem(problem, device, max_dim);
}

// Forward -------------------------------------------------------------------------------------------------------------

bool is_wide(const Problem& p) { return std::max(p.head_dim, p.head_dim_v) > 256; }

/// For heads wider than 256: 16 rows a warp, or 16 rows for two warps that share O's columns.
MmaForwardTile wide_tile(const Problem& p, int block_q, int block_kv) {
  return {block_q, block_kv, block_q / 16 * abi::forward_sm80_column_warps(static_cast<int>(p.head_dim_v))};
}

/// Whether 32 rows a warp fit in registers.
bool has_wide_warps(const Request& r) {
  return !r.features.touches_scores() && !r.features.entropy && std::max(r.problem.head_dim, r.problem.head_dim_v) <= 128;
}

/// SMs of sm_86, sm_89 and sm_120 have 100 KB of shared memory. Each block takes 1 KB more than it requests, and may
/// request 99 KB.
bool has_little_shared_memory(const DeviceInfo& device) { return device.shared_bytes <= 99 << 10; }
int blocks_per_small_sm(const Problem& problem, const MmaForwardTile& tile) {
  return (100 << 10) / (tile.shared_bytes(problem) + (1 << 10));
}

/// 32 rows a warp if they fit in registers, otherwise 16; fewer rows if there are few queries or little shared memory.
/// Even with little shared memory, eight warps must fit on an SM: as two blocks of four with 32 keys (head dimension
/// 128: 49 KB each), or one block of eight with 128 rows (head dimension 256: 97 KB; 64 x 64 would be four warps).
MmaForwardTile forward_tile(const Request& r) {
  const Problem& problem = r.problem;
  const DeviceInfo& device = r.device;
  if (is_wide(problem)) {
    const MmaForwardTile tile = wide_tile(problem, 64, 32);
    return tile.shared_bytes(problem) <= device.shared_bytes ? tile : wide_tile(problem, 32, 32);
  }
  const MmaForwardTile small{64, 64, 4}, large{128, 64, has_wide_warps(r) ? 4 : 8}, narrow{128, 32, large.num_warps};
  const auto fits = [&](const MmaForwardTile& tile) { return tile.shared_bytes(problem) <= device.shared_bytes; };
  if (is_short_for_sm90(r)) return {32, 64, 2};
  if (problem.seq_q <= 64) return small;
  const bool masked = r.features.has_mask_data();  // the map has blocks of 64 keys
  if (!has_little_shared_memory(device) || masked) return fits(large) ? large : small;
  const auto has_eight_warps = [&](const MmaForwardTile& tile) {
    return fits(tile) && blocks_per_small_sm(problem, tile) * tile.num_warps >= 8;
  };
  return has_eight_warps(large) ? large : has_eight_warps(narrow) ? narrow : fits(large) ? large : small;
}

/// A requested tile, with the number of warps that such a tile has.
MmaForwardTile asked_tile(const Request& r, const TileSize& asked) {
  const auto [block_q, block_kv] = asked;
  if (is_wide(r.problem)) return wide_tile(r.problem, block_q, block_kv);
  return {block_q, block_kv, block_q == 128 ? (has_wide_warps(r) && r.problem.seq_q > 64 ? 4 : 8) : block_q / 16};
}

std::string reject_forward_tile(const Request& r, const TileSize& asked) {
  const auto [block_q, block_kv] = asked;
  if (block_q != 32 && block_q != 64 && (block_q != 128 || is_wide(r.problem)))
    return is_wide(r.problem) ? "allowed are 32 and 64 queries" : "allowed are 32, 64 and 128 queries";
  if (block_kv != 32 && block_kv != 64 && block_kv != 96 && block_kv != 128) return "allowed are 32, 64, 96 and 128 keys";
  const bool masked = r.features.hidden_bounds != 0 || r.features.block_mask;
  if (masked && block_kv % 64 != 0) return "masks are known for blocks of 64 keys";
  return asked_tile(r, asked).reject_size(r.problem, r.device);
}

Answer plan_forward(const Request& r) {
  const Problem& problem = r.problem;
  if (std::string reason = reject_problem(problem, r.device, 512); !reason.empty()) return Refusal{std::move(reason)};
  if (is_wide(problem) && r.features.has_statistics()) return Refusal{"computes no statistics of heads wider than 256"};
  if (is_wide(problem) && (r.features.has_mask_data() || r.features.mask))
    return Refusal{"takes no masks of heads wider than 256: they are known for blocks of 64 keys"};
  MmaForwardTile tile = forward_tile(r);
  if (tile.shared_bytes(problem) > r.device.shared_bytes) return Refusal{"needs more shared memory"};
  if (r.tile) {
    const std::string reason = reject_forward_tile(r, *r.tile);
    if (!reason.empty()) return refuse_tile(*r.tile, reason);
    tile = asked_tile(r, *r.tile);
  }
  return Offer{lay_out_mma_forward(problem, tile, "forward/sm80", "forward_sm80")};
}

// Backward ------------------------------------------------------------------------------------------------------------

/// The largest tile whose gradients fit in registers and whose operands fit in shared memory.
std::optional<MmaBackwardTile> backward_tile(const Request& r) {
  const Problem& problem = r.problem;
  const DeviceInfo& device = r.device;
  const std::int64_t dim = std::max(problem.head_dim, problem.head_dim_v);
  const MmaBackwardTile small{64, 64, 2};
  const MmaBackwardTile large = dim <= 64 ? MmaBackwardTile{128, 128, 2} : dim <= 128 ? MmaBackwardTile{64, 128, 2} : small;
  if (r.features.touches_scores()) return first_that_fits({small, {64, 64, 1}}, problem, device);
  // 99 KB: at head dimension 64, half as many queries with as many keys, so that dQ is added to as seldom.
  const MmaBackwardTile half = dim <= 64 ? MmaBackwardTile{64, 128, 2} : small;
  return first_that_fits({large, half, small, {64, 64, 1}}, problem, device);
}

/// Why a requested tile is not possible: the gradients of a larger one do not fit in registers.
std::string reject_backward_tile(const Request& r, const TileSize& asked) {
  const std::int64_t dim = std::max(r.problem.head_dim, r.problem.head_dim_v);
  const auto [block_q, block_kv] = asked;
  const bool known = (block_q == 64 || block_q == 128) && (block_kv == 64 || block_kv == 128);
  if (!known) return "allowed are 64 and 128 queries and keys";
  if (block_kv == 128 && dim > 128) return "128 keys fit in registers up to a head_dim of 128";
  return block_q == 128 && dim > 64 ? "128 queries fit in registers up to a head_dim of 64" : "";
}

MmaQueryTile query_tile(const Problem& problem) {
  return {std::max(problem.head_dim, problem.head_dim_v) <= 128 ? 64 : 32};
}

Answer plan_backward(const Request& r) {
  const Problem& problem = r.problem;
  if (std::string reason = reject_problem(problem, r.device); !reason.empty()) return Refusal{std::move(reason)};
  std::optional<MmaBackwardTile> tile = backward_tile(r);
  if (r.tile) {
    const std::string reason = reject_backward_tile(r, *r.tile);
    if (!reason.empty()) return refuse_tile(*r.tile, reason);
    tile = MmaBackwardTile{r.tile->block_q, r.tile->block_kv, 1};
    if (r.num_stages == 0) tile = first_that_fits({{tile->block_q, tile->block_kv, 2}, *tile}, problem, r.device);
  }
  if (tile && r.num_stages > 0) {
    if (r.num_stages > 2) return Refusal{"has one or two stages"};
    tile = first_that_fits({{tile->block_q, tile->block_kv, r.num_stages}}, problem, r.device);
  }
  const MmaQueryTile queries = query_tile(problem);
  std::string reason = reject_mma_backward(problem, r.device, tile, queries);
  if (!reason.empty()) return Refusal{std::move(reason)};
  Plan plan = lay_out_mma_backward(problem, *tile, queries, {"backward/sm80", "backward/sm80_dq", "backward_sm80"});
  add_sm80_bias_launch(problem, r.device, plan);
  add_program_and_sink_launches(problem, plan);
  return Offer{std::move(plan)};
}

// dbias ---------------------------------------------------------------------------------------------------------------

/// A tile of dbias and its stages: BackwardSm80BiasSteps in kernels/backward/sm80_dbias/steps.cuh.
struct BiasTile {
  static constexpr int num_stages = 3;  // of 64 columns of queries and of keys
  int block;                            // queries and keys
  int num_warps;
  int blocks_per_sm;  // for which registers are enough

  int shared_bytes() const {
    constexpr int small_bytes = 1024;                       // steps, and the alignment
    const int floats = 3 * 2 * block + block / 32 * block;  // statistics of three steps, sums of warps
    return num_stages * 2 * block * 128 + floats * static_cast<int>(sizeof(float)) + small_bytes;
  }
  std::int64_t count(const Problem& p) const {
    return ceil_div(p.seq_kv, block) * (p.bias.q_stride == 0 ? 1 : ceil_div(p.seq_q, block)) *
           (p.bias.head_stride == 0 ? 1 : p.heads_q) * (p.bias.batch_stride == 0 ? 1 : p.batch);
  }
};

/// A large tile reads less: each row of Q or dO once for more keys. In it a warp has 32 x 64 elements, which take all
/// registers, so none are left for other options of scores. If there are too few large tiles for all SMs, small ones
/// are used, too.
BiasTile bias_tile(const Problem& p, const abi::Features& f, const DeviceInfo& device) {
  const BiasTile large{.block = 128, .num_warps = 8, .blocks_per_sm = 1};
  if (f.softcap || f.alibi || f.dropout || f.mask || f.has_tile_map() || f.score_program)
    return {.block = 64, .num_warps = 4, .blocks_per_sm = 2};
  // invariant: the order of sums must not depend on the size
  const bool few = large.count(p) < device.num_sms && !p.invariant;
  if (large.shared_bytes() > device.shared_bytes || few)
    return {.block = 64, .num_warps = 4, .blocks_per_sm = 3};
  return large;
}

}  // namespace

void add_sm80_bias_launch(const Problem& problem, const DeviceInfo& device, Plan& plan) {
  abi::BackwardConfig config = portable_backward_config(problem);
  if (!config.dbias) return;
  const BiasTile tile = bias_tile(problem, config.features, device);
  config.block_q = config.block_kv = tile.block;
  config.num_warps = tile.num_warps;
  config.num_stages = BiasTile::num_stages;
  add_launch(plan,
             {.unit = "backward/sm80_dbias",
              .entry = "backward_sm80_dbias",
              .config = launch_config(config),
              .block = 32 * config.num_warps,
              .shared_bytes = tile.shared_bytes(),
              .min_blocks_per_sm = tile.blocks_per_sm},
             std::min<std::int64_t>(tile.count(problem), std::int64_t{tile.blocks_per_sm} * device.num_sms));
}

std::span<const KernelEntry> sm80_kernels() {
  static constexpr std::string_view requirements =
      "sm_80 and up, float16 or bfloat16, strides that are multiples of 8, a positive scale";
  static const std::array<KernelEntry, 2> rows = mma_rows({.name = "forward/sm80",
                                                           .pass = Pass::forward,
                                                           .device = DeviceKind::cuda,
                                                           .requirements = requirements,
                                                           .proven = run_on_h200,
                                                           .prefill = true,
                                                           .plan = plan_forward},
                                                          {.name = "backward/sm80",
                                                           .pass = Pass::backward,
                                                           .device = DeviceKind::cuda,
                                                           .requirements = requirements,
                                                           .takes = {.tile = true, .stages = true},
                                                           .proven = run_on_h200,
                                                           .plan = plan_backward});
  return rows;
}

}  // namespace flash_attention::plan
