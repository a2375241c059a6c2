#include <algorithm>
#include <array>
#include <optional>

#include "plan/families/portable.h"
#include "plan/features.h"
#include "plan/kernel_config.h"
#include "plan/kernel_table.h"
#include "plan/workspace.h"

namespace flash_attention::plan {
namespace {

constexpr int small_bytes = 1024;  // a flag, statistics of rows, next to tiles, which are aligned to so much

std::int64_t tiles(std::int64_t rows, int block) { return (rows + block - 1) / block; }

/// tile::SwizzledTile: panels of 64 columns, 128 bytes a row.
int tile_bytes(int rows, std::int64_t columns) { return static_cast<int>((columns + 63) / 64) * rows * 128; }

std::string reject_problem(const Problem& problem, const DeviceInfo& device) {
  if (device.arch < 80) return "needs sm_80";
  if (problem.dtype == Dtype::float32) return "needs a 16-bit dtype";
  if (*problem.scale <= 0) return "needs a positive scale";
  if (problem.head_dim % 8 != 0 || problem.head_dim_v % 8 != 0) return "needs head dimensions that are multiples of 8";
  if (std::max(problem.head_dim, problem.head_dim_v) > 256) return "needs head dimensions up to 256";
  for (const Strides& strides : {problem.q_strides, problem.k_strides, problem.v_strides, problem.out_strides,
                                 problem.dout_strides, problem.dq_strides, problem.dk_strides, problem.dv_strides}) {
    if (strides.batch % 8 != 0 || strides.seq % 8 != 0 || strides.head % 8 != 0)
      return "needs strides that are multiples of 8";
  }
  return reject_grid(problem);
}

// Forward -------------------------------------------------------------------------------------------------------------

struct ForwardTile {
  int block_q, block_kv, num_warps;

  int shared_bytes(const Problem& problem) const {
    return tile_bytes(block_q, std::max(problem.head_dim, problem.head_dim_v)) + tile_bytes(block_kv, problem.head_dim) +
           tile_bytes(block_kv, problem.head_dim_v) + 2 * small_bytes;  // the row sums
  }
};

/// What a score needs in addition to its dot product and its place takes registers.
bool has_simple_scores(const Problem& problem) {
  const bool masked = problem.mask.present || problem.hidden_rows.bounds != 0 || problem.block_mask.block_q != 0;
  return problem.softcap == 0 && !problem.bias.present && !problem.alibi && !masked && problem.dropout_p == 0 &&
         problem.program.empty();
}

/// 32 rows a warp where so many fit in registers, else 16; fewer rows where there are few queries or little shared memory.
ForwardTile forward_tile(const Problem& problem, const DeviceInfo& device) {
  const ForwardTile small{64, 64, 4};
  const bool wide_warps = has_simple_scores(problem) && std::max(problem.head_dim, problem.head_dim_v) <= 128;
  const ForwardTile large = wide_warps ? ForwardTile{128, 64, 4} : ForwardTile{128, 64, 8};
  return problem.seq_q <= 64 || large.shared_bytes(problem) > device.shared_bytes ? small : large;
}

/// A tile that was requested, with the warps that such a tile has.
ForwardTile asked_tile(const Problem& problem, const DeviceInfo& device, const TileSize& asked) {
  const auto [block_q, block_kv] = asked;
  const int usual = forward_tile(problem, device).num_warps;
  return {block_q, block_kv, block_q == 128 ? (usual == 4 && problem.seq_q > 64 ? 4 : 8) : block_q / 16};
}

std::string reject_forward_tile(const Problem& problem, const DeviceInfo& device, const TileSize& asked) {
  const auto [block_q, block_kv] = asked;
  if (block_q != 32 && block_q != 64 && block_q != 128) return "allowed are 32, 64 and 128 queries";
  if (block_kv != 32 && block_kv != 64 && block_kv != 96 && block_kv != 128) return "allowed are 32, 64, 96 and 128 keys";
  const bool masked = problem.hidden_rows.bounds != 0 || problem.block_mask.block_q != 0;
  if (masked && block_kv % 64 != 0) return "masks are known for blocks of 64 keys";
  const int bytes = asked_tile(problem, device, asked).shared_bytes(problem);
  if (bytes <= device.shared_bytes) return "";
  return "it needs " + std::to_string(bytes) + " bytes of shared memory, there are " + std::to_string(device.shared_bytes);
}

std::string reject_forward(const Problem& problem, const DeviceInfo& device) {
  if (std::string reason = reject_problem(problem, device); !reason.empty()) return reason;
  if (forward_tile(problem, device).shared_bytes(problem) > device.shared_bytes) return "needs more shared memory";
  return "";
}

Plan lay_out_forward(const Problem& problem, const ForwardTile& tile) {
  Plan plan{.block_q = tile.block_q, .block_kv = tile.block_kv};
  const abi::ForwardConfig config{.features = features_with_map(problem),
                                  .head_dim = static_cast<int>(problem.head_dim),
                                  .head_dim_v = static_cast<int>(problem.head_dim_v),
                                  .block_q = tile.block_q,
                                  .block_kv = tile.block_kv,
                                  .num_warps = tile.num_warps};
  add_launch(plan,
             {.unit = "forward/sm80",
              .entry = "forward_sm80",
              .config = launch_config(config),
              .block = 32 * tile.num_warps,
              .shared_bytes = tile.shared_bytes(problem),
              .min_blocks_per_sm = tile.num_warps == 4 ? 2 : 1},
             tiles(problem.seq_q, tile.block_q) * problem.heads_q * problem.batch);
  return plan;
}

Plan lay_out_forward(const Problem& problem, const DeviceInfo& device) {
  return lay_out_forward(problem, forward_tile(problem, device));
}

Plan lay_out_forward_tile(const Problem& problem, const DeviceInfo& device, const TileSize& asked) {
  return lay_out_forward(problem, asked_tile(problem, device, asked));
}

// Backward ------------------------------------------------------------------------------------------------------------

constexpr int backward_warps = 8;

struct BackwardTile {
  int block_q, block_kv, num_stages;

  int shared_bytes(const Problem& problem) const {
    const int keys = tile_bytes(block_kv, problem.head_dim) + tile_bytes(block_kv, problem.head_dim_v);
    const int queries = tile_bytes(block_q, problem.head_dim) + tile_bytes(block_q, problem.head_dim_v) + small_bytes;
    return keys + num_stages * queries + 2 * tile_bytes(block_q, block_kv) + small_bytes;
  }
};

/// The largest tile whose gradients fit in registers and whose operands fit in shared memory.
std::optional<BackwardTile> backward_tile(const Problem& problem, const DeviceInfo& device) {
  const std::int64_t dim = std::max(problem.head_dim, problem.head_dim_v);
  const BackwardTile small{64, 64, 2};
  const BackwardTile large = dim <= 64 ? BackwardTile{128, 128, 2} : dim <= 128 ? BackwardTile{64, 128, 2} : small;
  for (const BackwardTile& tile : {has_simple_scores(problem) ? large : small, small, BackwardTile{64, 64, 1}}) {
    if (tile.shared_bytes(problem) <= device.shared_bytes) return tile;
  }
  return std::nullopt;
}

/// backward_sm80_dq: 16 queries a warp.
struct QueryTile {
  static constexpr int block_q = 16 * backward_warps;
  int block_kv;

  int shared_bytes(const Problem& problem) const {
    return tile_bytes(block_q + block_kv, problem.head_dim) + tile_bytes(block_q + block_kv, problem.head_dim_v) +
           small_bytes;
  }
};

QueryTile query_tile(const Problem& problem) { return {std::max(problem.head_dim, problem.head_dim_v) <= 128 ? 64 : 32}; }

std::string reject_backward(const Problem& problem, const DeviceInfo& device) {
  if (std::string reason = reject_problem(problem, device); !reason.empty()) return reason;
  const int dq_bytes = problem.deterministic ? query_tile(problem).shared_bytes(problem) : 0;
  if (!backward_tile(problem, device) || dq_bytes > device.shared_bytes) return "needs more shared memory";
  return "";
}

abi::BackwardConfig backward_config(const Problem& problem, int block_q, int block_kv, int num_stages) {
  abi::BackwardConfig config = portable_backward_config(problem);
  config.block_q = block_q;
  config.block_kv = block_kv;
  config.num_warps = backward_warps;
  config.num_stages = num_stages;
  config.dq_mode = problem.deterministic ? abi::DqMode::separate_kernel : abi::DqMode::atomic;
  return config;
}

/// QuerySums, whole tiles of fp32, as many as returned.
std::int64_t reserve_query_sums(const Problem& problem, int block_q, Plan& plan) {
  const std::int64_t count = problem.packed ? problem.heads_q * (problem.total_q / block_q + problem.batch)
                                            : problem.heads_q * problem.batch * tiles(problem.seq_q, block_q);
  const std::int64_t warps_n = backward_warps / (block_q / 32), steps = tiles(problem.head_dim, 16);
  const std::int64_t columns = (steps + warps_n - 1) / warps_n * warps_n * 16;
  reserve(plan, abi::BackwardSm80Region::dQ, count * block_q * columns * std::int64_t{sizeof(float)});
  return count;
}

Plan lay_out_backward(const Problem& problem, const DeviceInfo& device) {
  const BackwardTile tile = *backward_tile(problem, device);
  Plan plan{.block_q = tile.block_q, .block_kv = tile.block_kv};
  abi::BackwardConfig parts = backward_config(problem, tile.block_q, tile.block_kv, tile.num_stages);
  const LaunchConfig config = launch_config(parts);
  const std::int64_t heads = problem.heads_q * problem.batch;
  const auto launch = [&](std::string unit, std::string entry, const LaunchConfig& of, int shared_bytes,
                          std::int64_t blocks) {
    add_launch(plan,
               {.unit = std::move(unit),
                .entry = std::move(entry),
                .config = of,
                .block = 32 * backward_warps,
                .shared_bytes = shared_bytes},
               blocks);
  };
  reserve_row_delta(problem, plan);
  if (!problem.deterministic) {
    parts.features = row_features(parts.features);
    launch("backward/query_sums", "backward_clear_sums", launch_config(parts), 0,
           reserve_query_sums(problem, tile.block_q, plan));
  }
  add_delta_launch(problem, plan);
  launch("backward/sm80", "backward_sm80", config, tile.shared_bytes(problem),
         tiles(problem.seq_kv, tile.block_kv) * problem.heads_kv * problem.batch);
  if (problem.deterministic) {
    const QueryTile queries = query_tile(problem);
    launch("backward/sm80_dq", "backward_sm80_dq",
           launch_config(backward_config(problem, queries.block_q, queries.block_kv, 1)), queries.shared_bytes(problem),
           tiles(problem.seq_q, queries.block_q) * heads);
  } else {
    launch("backward/sm80_dq", "backward_sm80_finish_dq", config, tile_bytes(tile.block_q, problem.head_dim) + small_bytes,
           tiles(problem.seq_q, tile.block_q) * heads);
  }
  add_sm80_bias_launch(problem, device, plan);
  add_program_and_sink_launches(problem, plan);
  return plan;
}

}  // namespace

std::span<const KernelEntry> sm80_kernels() {
  static constexpr std::string_view requirements =
      "sm_80 and up, float16 or bfloat16, strides that are multiples of 8, a positive scale";
  static const std::array<KernelEntry, 2> rows{KernelEntry{.name = "forward/sm80",
                                                           .pass = Pass::forward,
                                                           .device = DeviceKind::cuda,
                                                           .requirements = requirements,
                                                           .pages = true,
                                                           .left_padding = true,
                                                           .hidden_rows = true,
                                                           .block_mask = true,
                                                           .programs = true,
                                                           .reject = reject_forward,
                                                           .lay_out = lay_out_forward,
                                                           .reject_tile = reject_forward_tile,
                                                           .lay_out_tile = lay_out_forward_tile},
                                               KernelEntry{.name = "backward/sm80",
                                                           .pass = Pass::backward,
                                                           .device = DeviceKind::cuda,
                                                           .requirements = requirements,
                                                           .hidden_rows = true,
                                                           .block_mask = true,
                                                           .programs = true,
                                                           .reject = reject_backward,
                                                           .lay_out = lay_out_backward}};
  return rows;
}

}  // namespace flash_attention::plan
