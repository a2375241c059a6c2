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

// Forward mode and second derivatives on a GPU: on CUDA cores, with mma.sync, and with wgmma.

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

/// 16 queries a warp; queries and their tangents stay in shared memory, keys, values and theirs have stages.
struct TangentTile {
  int block_q, block_kv, stages = 2;

  int shared_bytes(const Problem& problem) const {
    const auto bytes = [&](int rows, std::int64_t columns) { return swizzled_tile_bytes(problem, rows, columns); };
    return 2 * bytes(block_q, std::max(problem.head_dim, problem.head_dim_v)) +
           2 * stages * (bytes(block_kv, problem.head_dim) + bytes(block_kv, problem.head_dim_v));
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

abi::ForwardConfig tangent_config(const Problem& problem, const TangentTile& tile) {
  abi::ForwardConfig config = portable_config(problem);
  config.block_q = tile.block_q, config.block_kv = tile.block_kv, config.num_warps = tile.block_q / 16;
  return config;
}

Plan lay_out_tangent_sm80(const Problem& problem, const TangentTile& tile) {
  Plan plan{.block_q = tile.block_q, .block_kv = tile.block_kv};
  const abi::ForwardConfig config = tangent_config(problem, tile);
  add_launch(plan,
             {.unit = "tangent/sm80",
              .entry = "tangent_sm80",
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
  return Offer{lay_out_tangent_sm80(r.problem, tile)};
}

// tangent/sm90 --------------------------------------------------------------------------------------------------------

constexpr int sm90_copying_warps = 4;

/// As many stages as fit, at most 4. The tiles are filled up to 64 or 128 columns.
TangentTile with_stages(TangentTile tile, const Request& r) {
  for (tile.stages = 4; tile.stages > 2 && tile.shared_bytes(r.problem) + mma_small_bytes > r.device.shared_bytes;)
    --tile.stages;
  return tile;
}

/// 64 queries, two blocks of which share an SM, would read keys twice as often as 128: at 96 operations a byte L2 would be
/// the limit. They are for few queries.
TangentTile tangent_tile_sm90(const Request& r) {
  const bool few = r.problem.seq_q <= 64;
  return {few ? 64 : 128, is_wide(r.problem) && (few || r.features.touches_scores()) ? 32 : 64};
}

/// Whether the registers are enough for the products of two KV blocks. At 128 columns they are with 32 keys, but 64 one after
/// another are faster: 2.57 and 2.65 ms (H200, 16 heads of 8192).
bool has_late_values(const Request& r, const TangentTile& tile) {
  return !r.features.touches_scores() && ((tile.block_q == 128 && !is_wide(r.problem)) || tile.block_kv == 32);
}

abi::ForwardConfig tangent_config_sm90(const Request& r, const TangentTile& tile) {
  abi::ForwardConfig config = tangent_config(r.problem, tile);
  config.num_stages = tile.stages, config.late_values = has_late_values(r, tile);
  return config;
}

Plan lay_out_tangent_sm90(const Request& r, const TangentTile& tile) {
  Plan plan{.block_q = tile.block_q, .block_kv = tile.block_kv};
  const abi::ForwardConfig config = tangent_config_sm90(r, tile);
  add_launch(plan,
             {.unit = "tangent/sm90",
              .entry = "tangent_sm90",
              .config = launch_config(config),
              .block = 32 * (config.num_warps + sm90_copying_warps),
              .shared_bytes = tile.shared_bytes(r.problem) + mma_small_bytes,
              .min_blocks_per_sm = config.num_warps == 4 ? 2 : 1},
             ceil_div(r.problem.seq_q, tile.block_q) * r.problem.heads_q * r.problem.batch);
  return plan;
}

Answer plan_tangent_sm90(const Request& r) {
  if (r.device.arch != 90) return Refusal{"needs sm_90"};
  if (r.problem.dtype == Dtype::float32) return Refusal{"needs a 16-bit dtype"};
  std::string reason = reject_derivatives(r.problem);
  if (reason.empty()) reason = reject_mma_problem(r.problem, r.device, sm80_max_dim);
  if (reason.empty() && is_wide(r.problem) && r.features.modifies_scores() && (r.features.mask || r.features.has_tile_map()))
    reason = "has no registers for masks and options of scores of wide heads";
  if (!reason.empty()) return Refusal{std::move(reason)};
  TangentTile tile = tangent_tile_sm90(r);
  if (r.tile) {
    tile = {r.tile->block_q, r.tile->block_kv};
    if (reason = reject_tangent_tile(r, tile); !reason.empty()) return refuse_tile(*r.tile, reason);
  }
  return Offer{lay_out_tangent_sm90(r, with_stages(tile, r))};
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
  int rows, columns, stages = 2;

  int shared_bytes(const Problem& problem, bool of_keys) const {
    const auto bytes = [&](int count, std::int64_t width) { return swizzled_tile_bytes(problem, count, width); };
    const auto keys = [&](int count) { return 2 * (bytes(count, problem.head_dim) + bytes(count, problem.head_dim_v)); };
    const auto queries = [&](int count) {
      const int statistics = static_cast<int>(ceil_div(count * 4 * sizeof(float), mma_small_bytes)) * mma_small_bytes;
      return 2 * bytes(count, problem.head_dim) + bytes(count, problem.head_dim_v) + statistics;
    };
    return (of_keys ? keys(rows) + stages * queries(columns) : queries(rows) + stages * keys(columns)) + mma_small_bytes;
  }
};

/// Gradients of 128 columns leave room for the products of 16 columns of the other side.
SecondTile second_tile(const Problem& problem) { return {64, is_wide(problem) ? 16 : 32}; }

/// Why neither second/sm80 nor second/sm90 takes the problem.
std::string reject_second_mma(const Request& r) {
  const Problem& problem = r.problem;
  if (r.device.arch >= 80 && problem.dtype != Dtype::bfloat16)
    return "needs bfloat16: products of three gradients leave the range of float16";
  if (r.features.dropout) return "takes no dropout";
  if (r.features.score_program) return "has no second derivatives of a program's score";
  std::string reason = reject_derivatives(problem);
  return reason.empty() ? reject_mma_problem(problem, r.device, sm80_max_dim) : reason;
}

std::string reject_second_sm80(const Request& r) {
  const Problem& problem = r.problem;
  if (std::string reason = reject_second_mma(r); !reason.empty()) return reason;
  const SecondTile tile = second_tile(problem);
  const int bytes = std::max({tile.shared_bytes(problem, true), tile.shared_bytes(problem, false),
                              tangent_tile(r).shared_bytes(problem)});
  return bytes > r.device.shared_bytes ? "needs more shared memory" : "";
}

/// A launch of the rows, then one for each side.
struct SecondLaunches {
  std::string unit, prefix;
  abi::ForwardConfig of_rows;
  int row_shared_bytes;
  SecondTile of_keys, of_queries;
  int copying_warps;
};

Plan lay_out_second_mma(const Problem& problem, const SecondLaunches& launches) {
  const SecondTile &of_keys = launches.of_keys, &of_queries = launches.of_queries;
  const int barriers = launches.copying_warps != 0 ? mma_small_bytes : 0;
  Plan plan{.block_q = of_keys.columns, .block_kv = of_keys.rows};
  reserve_rows(problem, plan);
  const auto add = [&](const char* name, const LaunchConfig& config, int warps, int shared_bytes, std::int64_t blocks) {
    add_launch(plan,
               {.unit = launches.unit,
                .entry = launches.prefix + name,
                .config = config,
                .block = 32 * (warps + launches.copying_warps),
                .shared_bytes = shared_bytes,
                .min_blocks_per_sm = warps == 4 ? 2 : 1},
               blocks);
  };
  const abi::ForwardConfig& forward = launches.of_rows;
  const std::int64_t heads = problem.heads_q * problem.batch;
  add("_rows", launch_config(forward), forward.num_warps, launches.row_shared_bytes,
      std::max(ceil_div(problem.seq_q, forward.block_q) * heads, tail_blocks(problem)));
  const auto add_side = [&](const char* name, const SecondTile& tile, bool has_keys, std::int64_t blocks) {
    abi::BackwardConfig config = portable_backward_config(problem);
    config.num_warps = tile.rows / 16, config.num_stages = tile.stages;
    config.block_q = has_keys ? tile.columns : tile.rows, config.block_kv = has_keys ? tile.rows : tile.columns;
    add(name, launch_config(config), config.num_warps, tile.shared_bytes(problem, has_keys) + barriers, blocks);
  };
  add_side("_dkv", of_keys, true, ceil_div(problem.seq_kv, of_keys.rows) * problem.heads_kv * problem.batch);
  add_side("_dq", of_queries, false, ceil_div(problem.seq_q, of_queries.rows) * heads);
  add_bias_launch(problem, "second/portable", "second_dbias", plan);
  add_sink_launch(problem, "second/portable", "second_dsink", plan);
  return plan;
}

Answer plan_second_sm80(const Request& r) {
  return offer_unless(reject_second_sm80(r), [&] {
    const TangentTile of_rows = tangent_tile(r);
    return lay_out_second_mma(r.problem, {.unit = "second/sm80",
                                          .prefix = "second_sm80",
                                          .of_rows = tangent_config(r.problem, of_rows),
                                          .row_shared_bytes = of_rows.shared_bytes(r.problem),
                                          .of_keys = second_tile(r.problem),
                                          .of_queries = second_tile(r.problem),
                                          .copying_warps = 0});
  });
}

// second/sm90 ---------------------------------------------------------------------------------------------------------

std::string reject_second_sm90(const Request& r) {
  if (r.device.arch != 90) return "needs sm_90";
  if (std::string reason = reject_second_mma(r); !reason.empty()) return reason;
  if (is_wide(r.problem) && r.features.modifies_scores()) return "has no registers for options of scores of wide heads";
  return std::max(r.problem.seq_q, r.problem.seq_kv) <= 64 ? "has tiles of 128 rows, which would not be filled" : "";
}

Answer plan_second_sm90(const Request& r) {
  return offer_unless(reject_second_sm90(r), [&] {
    const TangentTile of_rows = with_stages(tangent_tile_sm90(r), r);
    const bool wide = is_wide(r.problem), modifies = r.features.modifies_scores();
    return lay_out_second_mma(r.problem, {.unit = "second/sm90",
                                          .prefix = "second_sm90",
                                          .of_rows = tangent_config_sm90(r, of_rows),
                                          .row_shared_bytes = of_rows.shared_bytes(r.problem) + mma_small_bytes,
                                          .of_keys = {128, wide || modifies ? 32 : 64, 3},
                                          .of_queries = {128, wide ? 32 : 64, 3},
                                          .copying_warps = sm90_copying_warps});
  });
}

// second/portable -----------------------------------------------------------------------------------------------------

Answer plan_second(const Request& r) {
  std::string reason = reject_derivatives(r.problem);
  if (r.features.score_program) reason = "has no second derivatives of a program's score";
  return offer_unless(std::move(reason), [&] { return lay_out_second(r.problem); });
}

}  // namespace

std::span<const KernelEntry> tangent_kernels() {
  static const std::array<KernelEntry, 6> rows{
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
      KernelEntry{.name = "second/sm90",
                  .pass = Pass::second,
                  .device = DeviceKind::cuda,
                  .requirements = "sm_90, bfloat16, heads of up to 128 columns, no dropout, no program that changes scores, "
                                  "strides that are multiples of 8, a positive scale, more than 64 queries or keys, "
                                  "above 64 columns no soft cap, bias or ALiBi",
                  .takes = {.hidden_rows = true, .block_mask = true, .programs = true},
                  .proven = run_on_h200,
                  .plan = plan_second_sm90},
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
