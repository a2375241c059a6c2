#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "plan/families/mma.h"
#include "plan/families/portable.h"
#include "plan/features.h"
#include "plan/kernel_config.h"
#include "plan/kernel_table.h"
#include "plan/workspace.h"
#include "support/ceil_div.h"

// Forward mode and second derivatives on a GPU: on CUDA cores, with mma.sync, and forward mode with wgmma.

namespace flash_attention::plan {
namespace {

constexpr int block = 64;     // tile::block_rows
constexpr int num_warps = 8;  // tile::product_threads / 32

std::string reject_derivatives(const Problem& problem) {
  if (problem.invariant) return "the order of its sums is another than that of forward and backward, and bits are invariant";
  return reject_grid(problem);
}

std::int64_t query_blocks(const Problem& problem) {
  return ceil_div(problem.seq_q, block) * problem.heads_q * problem.batch;
}

/// A launch of `blocks` blocks of CUDA cores, whose products are those of tile/product.cuh.
void add_portable_launch(Plan& plan, std::string unit, std::string entry, const LaunchConfig& config, std::int64_t blocks) {
  add_launch(plan,
             {.unit = std::move(unit),
              .entry = std::move(entry),
              .config = config,
              .block = 32 * num_warps,
              .shared_bytes = portable_shared_bytes},
             blocks);
}

abi::ForwardConfig portable_config(const Problem& problem) {
  return {.features = with_map(features_of(problem)),
          .head_dim = static_cast<int>(problem.head_dim),
          .head_dim_v = static_cast<int>(problem.head_dim_v),
          .block_q = block,
          .block_kv = block,
          .num_warps = num_warps};
}

Answer plan_tangent(const Request& r) {
  return offer_unless(reject_derivatives(r.problem), [&] {
    Plan plan{.block_q = block, .block_kv = block};
    add_portable_launch(plan, "tangent/portable", "tangent_portable", launch_config(portable_config(r.problem)),
                        query_blocks(r.problem));
    return plan;
  });
}

// tangent/sm80 --------------------------------------------------------------------------------------------------------

constexpr std::int64_t sm80_max_dim = 128;  // S, S., O and A of wider heads do not fit in registers

/// 16 queries a warp; queries and their tangents stay in shared memory, keys, values and theirs have two stages.
struct TangentTile {
  int block_q, block_kv;

  int shared_bytes(const Problem& problem) const {
    const auto bytes = [&](int rows, std::int64_t columns) { return swizzled_tile_bytes(problem, rows, columns); };
    return 2 * bytes(block_q, std::max(problem.head_dim, problem.head_dim_v)) +
           4 * (bytes(block_kv, problem.head_dim) + bytes(block_kv, problem.head_dim_v));
  }
};

bool is_wide(const Problem& problem) { return std::max(problem.head_dim, problem.head_dim_v) > 64; }

/// Large tiles, so that many queries share the loaded keys; smaller ones if queries are few or shared memory is small.
TangentTile tangent_tile(const Request& r) {
  const int block_kv = is_wide(r.problem) ? 32 : 64;
  const TangentTile large{128, block_kv}, small{64, block_kv};
  return r.problem.seq_q <= 64 || large.shared_bytes(r.problem) > r.device.shared_bytes ? small : large;
}

std::string reject_tangent_tile(const Request& r, const TangentTile& tile) {
  if (tile.block_q != 64 && tile.block_q != 128) return "allowed are 64 and 128 queries";
  if (tile.block_kv != 32 && tile.block_kv != 64) return "allowed are 32 and 64 keys";
  const int bytes = tile.shared_bytes(r.problem);
  if (bytes <= r.device.shared_bytes) return "";
  return "it needs " + std::to_string(bytes) + " bytes of shared memory, there are " + std::to_string(r.device.shared_bytes);
}

Plan lay_out_tangent(const Problem& problem, const TangentTile& tile, std::string unit, std::string entry) {
  Plan plan{.block_q = tile.block_q, .block_kv = tile.block_kv};
  abi::ForwardConfig config = portable_config(problem);
  config.block_q = tile.block_q, config.block_kv = tile.block_kv, config.num_warps = tile.block_q / 16;
  add_launch(plan,
             {.unit = std::move(unit),
              .entry = std::move(entry),
              .config = launch_config(config),
              .block = 32 * config.num_warps,
              .shared_bytes = tile.shared_bytes(problem),
              .min_blocks_per_sm = config.num_warps == 4 ? 2 : 1},
             ceil_div(problem.seq_q, tile.block_q) * problem.heads_q * problem.batch);
  return plan;
}

Answer plan_tangent_sm80(const Request& r) {
  if (r.device.arch >= 80 && r.problem.dtype == Dtype::float32) return Refusal{"needs a 16-bit dtype"};
  std::string reason = reject_derivatives(r.problem);
  if (reason.empty()) reason = reject_mma_problem(r.problem, r.device, sm80_max_dim);
  if (!reason.empty()) return Refusal{std::move(reason)};
  TangentTile tile = tangent_tile(r);
  if (r.tile) {
    tile = {r.tile->block_q, r.tile->block_kv};
    if (reason = reject_tangent_tile(r, tile); !reason.empty()) return refuse_tile(*r.tile, reason);
  }
  if (tile.shared_bytes(r.problem) > r.device.shared_bytes) return Refusal{"needs more shared memory"};
  return Offer{lay_out_tangent(r.problem, tile, "tangent/sm80", "tangent_sm80")};
}

// tangent/sm90 --------------------------------------------------------------------------------------------------------

/// Widths are filled up to 64 or 128 columns. 64 queries, two blocks of which share an SM, would read keys twice as often as
/// 128: at 96 operations a byte L2 would be the limit. They are for few queries. Options of scores need the registers of 32
/// keys of wide heads.
Answer plan_tangent_sm90(const Request& r) {
  if (r.device.arch != 90) return Refusal{"needs sm_90"};
  if (r.problem.dtype == Dtype::float32) return Refusal{"needs a 16-bit dtype"};
  std::string reason = reject_derivatives(r.problem);
  if (reason.empty()) reason = reject_mma_problem(r.problem, r.device, sm80_max_dim);
  if (!reason.empty()) return Refusal{std::move(reason)};
  const bool few = r.problem.seq_q <= 64;
  const bool few_registers = is_wide(r.problem) && (few || r.features.touches_scores());
  TangentTile tile{few ? 64 : 128, few_registers ? 32 : 64};
  if (r.tile) {
    tile = {r.tile->block_q, r.tile->block_kv};
    if (reason = reject_tangent_tile(r, tile); !reason.empty()) return refuse_tile(*r.tile, reason);
  }
  return Offer{lay_out_tangent(r.problem, tile, "tangent/sm90", "tangent_sm90")};
}

// Second derivatives --------------------------------------------------------------------------------------------------

/// delta, lse. and R of each row.
void reserve_rows(const Problem& problem, Plan& plan) {
  reserve_row_delta(problem, plan);
  const std::int64_t rows = problem.packed ? problem.total_q : problem.batch * problem.seq_q;
  for (const abi::SecondRegion region : {abi::SecondRegion::lse_tangent, abi::SecondRegion::rest})
    reserve(plan, region, rows * problem.heads_q * std::int64_t{sizeof(float)});
}

/// Keys in no sequence are cleared by the launch of the rows, though there may be no row.
std::int64_t tail_blocks(const Problem& problem) { return problem.packed && problem.batch > 0 ? 1 : 0; }

Plan lay_out_second(const Problem& problem) {
  Plan plan{.block_q = block, .block_kv = block};
  const LaunchConfig config = launch_config(portable_backward_config(problem));
  reserve_rows(problem, plan);
  add_portable_launch(plan, "second/portable", "second_portable_rows", launch_config(portable_config(problem)),
                      std::max(query_blocks(problem), tail_blocks(problem)));
  add_portable_launch(plan, "second/portable", "second_portable_dkv", config,
                      ceil_div(problem.seq_kv, block) * problem.heads_kv * problem.batch);
  add_portable_launch(plan, "second/portable", "second_portable_dq", config, query_blocks(problem));
  add_bias_launch(problem, "second/portable", "second_dbias", plan);
  add_sink_launch(problem, "second/portable", "second_dsink", plan);
  return plan;
}

// second/sm80 ---------------------------------------------------------------------------------------------------------

/// Rows that a thread block owns, 16 a warp, and columns that its loop goes over, which have two stages: keys and queries for
/// dK and dV, queries and keys for dQ.
struct SecondTile {
  int rows, columns;

  int shared_bytes(const Problem& problem, bool of_keys) const {
    const auto bytes = [&](int count, std::int64_t width) { return swizzled_tile_bytes(problem, count, width); };
    const auto keys = [&](int count) { return 2 * (bytes(count, problem.head_dim) + bytes(count, problem.head_dim_v)); };
    const auto queries = [&](int count) {
      return 2 * bytes(count, problem.head_dim) + bytes(count, problem.head_dim_v) + mma_small_bytes;
    };
    return (of_keys ? keys(rows) + 2 * queries(columns) : queries(rows) + 2 * keys(columns)) + mma_small_bytes;
  }
};

/// Gradients of 128 columns leave room for the products of 16 columns of the other side.
SecondTile second_tile(const Problem& problem) { return {64, is_wide(problem) ? 16 : 32}; }

std::string reject_second_sm80(const Request& r) {
  const Problem& problem = r.problem;
  if (r.device.arch >= 80 && problem.dtype != Dtype::bfloat16)
    return "needs bfloat16: products of three gradients leave the range of float16";
  if (r.features.dropout) return "takes no dropout";
  if (r.features.score_program) return "has no second derivatives of a program's score";
  std::string reason = reject_derivatives(problem);
  if (reason.empty()) reason = reject_mma_problem(problem, r.device, sm80_max_dim);
  if (!reason.empty()) return reason;
  const SecondTile tile = second_tile(problem);
  const int bytes = std::max({tile.shared_bytes(problem, true), tile.shared_bytes(problem, false),
                              tangent_tile(r).shared_bytes(problem)});
  return bytes > r.device.shared_bytes ? "needs more shared memory" : "";
}

Plan lay_out_second_sm80(const Request& r) {
  const Problem& problem = r.problem;
  const TangentTile of_rows = tangent_tile(r);
  const SecondTile tile = second_tile(problem);
  Plan plan{.block_q = tile.columns, .block_kv = tile.rows};
  reserve_rows(problem, plan);
  const auto add = [&](std::string entry, const LaunchConfig& config, int warps, int shared_bytes, std::int64_t blocks) {
    add_launch(plan,
               {.unit = "second/sm80",
                .entry = std::move(entry),
                .config = config,
                .block = 32 * warps,
                .shared_bytes = shared_bytes,
                .min_blocks_per_sm = warps == 4 ? 2 : 1},
               blocks);
  };
  abi::ForwardConfig forward = portable_config(problem);
  forward.block_q = of_rows.block_q, forward.block_kv = of_rows.block_kv, forward.num_warps = of_rows.block_q / 16;
  const std::int64_t heads = problem.heads_q * problem.batch;
  add("second_sm80_rows", launch_config(forward), forward.num_warps, of_rows.shared_bytes(problem),
      std::max(ceil_div(problem.seq_q, of_rows.block_q) * heads, tail_blocks(problem)));
  abi::BackwardConfig backward = portable_backward_config(problem);
  backward.num_warps = tile.rows / 16;
  backward.block_q = tile.columns, backward.block_kv = tile.rows;
  add("second_sm80_dkv", launch_config(backward), backward.num_warps, tile.shared_bytes(problem, true),
      ceil_div(problem.seq_kv, tile.rows) * problem.heads_kv * problem.batch);
  backward.block_q = tile.rows, backward.block_kv = tile.columns;
  add("second_sm80_dq", launch_config(backward), backward.num_warps, tile.shared_bytes(problem, false),
      ceil_div(problem.seq_q, tile.rows) * heads);
  add_bias_launch(problem, "second/portable", "second_dbias", plan);
  add_sink_launch(problem, "second/portable", "second_dsink", plan);
  return plan;
}

Answer plan_second_sm80(const Request& r) {
  return offer_unless(reject_second_sm80(r), [&] { return lay_out_second_sm80(r); });
}

// second/portable -----------------------------------------------------------------------------------------------------

Answer plan_second(const Request& r) {
  std::string reason = reject_derivatives(r.problem);
  if (r.features.score_program) reason = "has no second derivatives of a program's score";
  return offer_unless(std::move(reason), [&] { return lay_out_second(r.problem); });
}

}  // namespace

std::span<const KernelEntry> tangent_kernels() {
  static const std::array<KernelEntry, 5> rows{
      KernelEntry{.name = "tangent/sm90",
                  .pass = Pass::tangent,
                  .device = DeviceKind::cuda,
                  .requirements = "sm_90, float16 or bfloat16, heads of up to 128 columns, strides that are multiples of 8, a "
                                  "positive scale",
                  .takes = {.hidden_rows = true, .block_mask = true, .programs = true, .tile = true},
                  .proven = run_on_h200,
                  .plan = plan_tangent_sm90},
      KernelEntry{.name = "tangent/sm80",
                  .pass = Pass::tangent,
                  .device = DeviceKind::cuda,
                  .requirements = "sm_80 and up, float16 or bfloat16, heads of up to 128 columns, strides that are multiples "
                                  "of 8, a positive scale",
                  .takes = {.hidden_rows = true, .block_mask = true, .programs = true, .tile = true},
                  .proven = run_on_h200,
                  .plan = plan_tangent_sm80},
      KernelEntry{.name = "tangent/portable",
                  .pass = Pass::tangent,
                  .device = DeviceKind::cuda,
                  .requirements = "any GPU from sm_70, every dtype and option that has tangents",
                  .takes = {.hidden_rows = true, .block_mask = true, .programs = true},
                  .plan = plan_tangent},
      KernelEntry{.name = "second/sm80",
                  .pass = Pass::second,
                  .device = DeviceKind::cuda,
                  .requirements = "sm_80 and up, bfloat16, heads of up to 128 columns, no dropout, no program that changes "
                                  "scores, strides that are multiples of 8, a positive scale",
                  .takes = {.hidden_rows = true, .block_mask = true, .programs = true},
                  .proven = run_on_h200,
                  .plan = plan_second_sm80},
      KernelEntry{.name = "second/portable",
                  .pass = Pass::second,
                  .device = DeviceKind::cuda,
                  .requirements = "any GPU from sm_70, every dtype and option but programs that change scores",
                  .takes = {.hidden_rows = true, .block_mask = true, .programs = true},
                  .plan = plan_second}};
  return rows;
}

}  // namespace flash_attention::plan
