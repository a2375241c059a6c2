#include "plan/families/mma.h"

#include <algorithm>

#include "abi/forward_sm80.h"
#include "plan/families/portable.h"
#include "plan/features.h"
#include "plan/kernel_config.h"
#include "plan/workspace.h"

namespace flash_attention::plan {

int swizzled_tile_bytes(Dtype dtype, int rows, std::int64_t columns) {
  const std::int64_t row_bytes = columns * static_cast<std::int64_t>(size_of(dtype));
  return static_cast<int>((row_bytes + 127) / 128) * rows * 128;
}
int swizzled_tile_bytes(const Problem& problem, int rows, std::int64_t columns) {
  return swizzled_tile_bytes(problem.dtype, rows, columns);
}

std::string reject_mma_problem(const Problem& problem, const DeviceInfo& device, std::int64_t max_dim) {
  if (device.arch < 80) return "needs sm_80";
  if (*problem.scale <= 0) return "needs a positive scale";
  if (problem.head_dim % 8 != 0 || problem.head_dim_v % 8 != 0) return "needs head dimensions that are multiples of 8";
  if (std::max(problem.head_dim, problem.head_dim_v) > max_dim)
    return "needs head dimensions up to " + std::to_string(max_dim);
  const auto chunk = static_cast<std::int64_t>(16 / size_of(problem.dtype));  // elements that move at once
  for (const Strides& strides : {problem.q_strides, problem.k_strides, problem.v_strides, problem.out_strides,
                                 problem.dout_strides, problem.dq_strides, problem.dk_strides, problem.dv_strides}) {
    if (strides.batch % chunk != 0 || strides.seq % chunk != 0 || strides.head % chunk != 0)
      return "needs strides that are multiples of " + std::to_string(chunk);
  }
  return reject_grid(problem);
}

bool has_fp32_products(const Problem& problem) {
  return problem.dtype == Dtype::float32 && problem.precision == Precision::ieee;
}

// Forward -------------------------------------------------------------------------------------------------------------

int MmaForwardTile::shared_bytes(const Problem& problem) const {
  const std::int64_t v_columns = abi::forward_sm80_value_columns(static_cast<int>(problem.head_dim_v));
  const int Q = swizzled_tile_bytes(*problem.q_dtype, block_q, problem.head_dim);
  const int K = swizzled_tile_bytes(*problem.kv_dtype, block_kv, problem.head_dim);
  const int V = swizzled_tile_bytes(*problem.kv_dtype, block_kv, v_columns);
  const int O = swizzled_tile_bytes(problem.dtype, block_q, v_columns);
  const bool codes = *problem.q_dtype != problem.dtype;  // O is over Q, of codes over K and V, too
  const int tiles = codes ? std::max(Q + K + V, O) : std::max(Q, O) + K + V;
  if (has_fp32_products(problem)) return tiles + mma_small_bytes + swizzled_tile_bytes(problem, block_q, block_kv);  // P
  // ForwardSm80Shape::sums_in_shared: for kernels whose S and O fill the registers, including wide heads.
  const std::int64_t m_tiles = block_q / num_warps / 16, dim_v = mma_tiles(problem.head_dim_v, 16) * 16;
  const bool wide = std::max(problem.head_dim, problem.head_dim_v) > 256;
  const bool sums_in_shared = wide || m_tiles * (block_kv + dim_v) / 2 >= 192;
  return tiles + (sums_in_shared ? 2 : 1) * mma_small_bytes;
}

std::string MmaForwardTile::reject_size(const Problem& problem, const DeviceInfo& device) const {
  const int bytes = shared_bytes(problem);
  if (bytes <= device.shared_bytes) return "";
  return "it needs " + std::to_string(bytes) + " bytes of shared memory, there are " + std::to_string(device.shared_bytes);
}

/// 128 keys with 32 a warp, whose K takes 64 registers, or 16 a warp with wide heads; 64 queries at a time, two tiles
/// in flight.
void add_sm80_key_mass_launch(const Problem& problem, Plan& plan) {
  if (!problem.return_key_mass) return;
  if (problem.dtype == Dtype::float32) return add_key_mass_launch(problem, plan);
  abi::ForwardConfig config{.features = with_map(features_of(problem)),
                            .head_dim = static_cast<int>(problem.head_dim),
                            .head_dim_v = static_cast<int>(problem.head_dim),
                            .block_q = 64,
                            .block_kv = 128,
                            .num_warps = problem.head_dim <= 128 ? 4 : 8};
  config.features = key_mass_features(config.features);
  const int columns = swizzled_tile_bytes(problem, 1, problem.head_dim);
  add_launch(plan,
             {.unit = "forward/key_mass_sm80",
              .entry = "forward_key_mass_sm80",
              .config = launch_config(config),
              .block = 32 * config.num_warps,
              .shared_bytes = (config.block_kv + 2 * config.block_q) * columns + mma_small_bytes,
              .min_blocks_per_sm = problem.head_dim <= 64 ? 3 : config.num_warps == 4 ? 2 : 1},
             mma_tiles(problem.seq_kv, config.block_kv) * problem.heads_q * problem.batch);
}

void add_sm90_key_mass_launch(const Problem& problem, Plan& plan) {
  if (!problem.return_key_mass) return;
  if (problem.head_dim > 128) return add_sm80_key_mass_launch(problem, plan);
  // 16 warps of 128 registers: two blocks, or one if their keys do not fit into shared memory twice.
  const bool light = !key_mass_features(features_of(problem)).touches_scores(), wide = problem.head_dim > 64;
  const bool long_keys = wide && light && problem.seq_kv > 1024;
  abi::ForwardConfig config{.features = with_map(features_of(problem)),
                            .head_dim = static_cast<int>(problem.head_dim),
                            .head_dim_v = static_cast<int>(problem.head_dim),
                            .block_q = 128,
                            .block_kv = long_keys ? 512 : 256,
                            .num_warps = long_keys ? 16 : 8};
  config.features = key_mass_features(config.features);
  const int columns = swizzled_tile_bytes(problem, 1, problem.head_dim);
  add_launch(plan,
             {.unit = "forward/key_mass_sm90",
              .entry = "forward_key_mass_sm90",
              .config = launch_config(config),
              .block = 32 * config.num_warps,
              .shared_bytes = (config.block_kv + 2 * config.block_q) * columns + 2 * mma_small_bytes,
              .min_blocks_per_sm = light && !wide ? 2 : 1},
             mma_tiles(problem.seq_kv, config.block_kv) * problem.heads_q * problem.batch);
}

Plan lay_out_mma_forward(const Problem& problem, const MmaForwardTile& tile, std::string unit, std::string entry) {
  Plan plan{.block_q = tile.block_q, .block_kv = tile.block_kv};
  abi::ForwardConfig config{.features = forward_features(with_map(features_of(problem))),
                            .head_dim = static_cast<int>(problem.head_dim),
                            .head_dim_v = static_cast<int>(problem.head_dim_v),
                            .block_q = tile.block_q,
                            .block_kv = tile.block_kv,
                            .num_warps = tile.num_warps};
  config.features.fp32_products = has_fp32_products(problem);
  add_max_logit_launch(problem, plan);
  add_launch(plan,
             {.unit = std::move(unit),
              .entry = std::move(entry),
              .config = launch_config(config),
              .block = 32 * tile.num_warps,
              .shared_bytes = tile.shared_bytes(problem),
              .min_blocks_per_sm = tile.num_warps == 4 ? 2 : 1},
             mma_tiles(problem.seq_q, tile.block_q) * problem.heads_q * problem.batch);
  add_sm80_key_mass_launch(problem, plan);
  return plan;
}

// Backward ------------------------------------------------------------------------------------------------------------

int MmaBackwardTile::shared_bytes(const Problem& problem) const {
  const auto rows = [&](int count) {
    return swizzled_tile_bytes(problem, count, problem.head_dim) + swizzled_tile_bytes(problem, count, problem.head_dim_v);
  };
  return rows(block_kv) + num_stages * (rows(block_q) + mma_small_bytes) +
         (has_fp32_products(problem) ? 1 : 2) * swizzled_tile_bytes(problem, block_q, block_kv) + mma_small_bytes;  // P, dS
}

std::optional<MmaBackwardTile> first_that_fits(std::initializer_list<MmaBackwardTile> tiles, const Problem& problem,
                                               const DeviceInfo& device) {
  for (const MmaBackwardTile& tile : tiles) {
    if (tile.shared_bytes(problem) <= device.shared_bytes) return tile;
  }
  return std::nullopt;
}

int MmaQueryTile::shared_bytes(const Problem& problem) const {
  return swizzled_tile_bytes(problem, block_q + block_kv, problem.head_dim) +
         swizzled_tile_bytes(problem, block_q + block_kv, problem.head_dim_v) + mma_small_bytes +
         (has_fp32_products(problem) ? swizzled_tile_bytes(problem, block_q, block_kv) : 0);  // dS
}

namespace {

abi::BackwardConfig backward_config(const Problem& problem, int block_q, int block_kv, int num_stages) {
  abi::BackwardConfig config = portable_backward_config(problem);
  config.features.fp32_products = has_fp32_products(problem);
  config.block_q = block_q;
  config.block_kv = block_kv;
  config.num_warps = mma_backward_warps;
  config.num_stages = num_stages;
  config.dq_mode = problem.deterministic ? abi::DqMode::separate_kernel : abi::DqMode::atomic;
  return config;
}

/// Reserves QuerySums, whole tiles of fp32. Returns their number.
std::int64_t reserve_query_sums(const Problem& problem, int block_q, Plan& plan) {
  const std::int64_t count = problem.packed ? problem.heads_q * (problem.total_q / block_q + problem.batch)
                                            : problem.heads_q * problem.batch * mma_tiles(problem.seq_q, block_q);
  const std::int64_t warps_n = mma_backward_warps / (block_q / 32), steps = mma_tiles(problem.head_dim, 16);
  const std::int64_t columns = (steps + warps_n - 1) / warps_n * warps_n * 16;
  reserve(plan, abi::BackwardSm80Region::dQ, count * block_q * columns * std::int64_t{sizeof(float)});
  return count;
}

}  // namespace

Plan lay_out_mma_backward(const Problem& problem, const MmaBackwardTile& tile, const MmaQueryTile& queries,
                          const MmaBackwardNames& names) {
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
                .block = 32 * mma_backward_warps,
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
  launch(names.unit, names.entry, config, tile.shared_bytes(problem),
         mma_tiles(problem.seq_kv, tile.block_kv) * problem.heads_kv * problem.batch);
  if (problem.deterministic) {
    launch(names.dq_unit, names.entry + "_dq",
           launch_config(backward_config(problem, queries.block_q, queries.block_kv, 1)), queries.shared_bytes(problem),
           mma_tiles(problem.seq_q, queries.block_q) * heads);
  } else {
    launch(names.dq_unit, names.entry + "_finish_dq", config,
           swizzled_tile_bytes(problem, tile.block_q, problem.head_dim) + mma_small_bytes,
           mma_tiles(problem.seq_q, tile.block_q) * heads);
  }
  return plan;
}

std::string reject_mma_backward(const Problem& problem, const DeviceInfo& device,
                                const std::optional<MmaBackwardTile>& tile, const MmaQueryTile& queries) {
  const int dq_bytes = problem.deterministic ? queries.shared_bytes(problem) : 0;
  return !tile || dq_bytes > device.shared_bytes ? "needs more shared memory" : "";
}

std::array<KernelEntry, 2> mma_rows(KernelEntry forward, KernelEntry backward) {
  for (KernelEntry* row : {&forward, &backward})
    row->takes.hidden_rows = row->takes.block_mask = row->takes.programs = true;
  forward.takes.bit_mask = forward.takes.sequence_windows = true;
  forward.takes.pages = forward.takes.left_padding = forward.takes.tile = forward.takes.statistics = true;
  return {forward, backward};
}

}  // namespace flash_attention::plan
