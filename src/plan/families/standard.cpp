#include <algorithm>
#include <array>
#include <limits>

#include "plan/families/portable.h"
#include "plan/features.h"
#include "plan/kernel_config.h"
#include "plan/kernel_table.h"
#include "plan/workspace.h"

namespace flash_attention::plan {
namespace {

constexpr int block = 64;  // tile::block_rows
constexpr int threads = 256;
constexpr int rows_per_softmax_block = threads / 32;
constexpr int shared_bytes = 2 * 64 * 68 * 4;  // standard::TileStorage

using Region = abi::StandardRegion;

std::int64_t tiles(std::int64_t rows, int tile = block) { return (rows + tile - 1) / tile; }

void reserve_matrix(const Problem& problem, Plan& plan, Region which, std::size_t element_bytes) {
  const std::int64_t elements =
      problem.batch * problem.heads_q * tiles(problem.seq_q) * tiles(problem.seq_kv) * block * block;
  reserve(plan, which, elements * static_cast<std::int64_t>(element_bytes));
}

/// Launches of one unit and configuration.
struct Launcher {
  Plan& plan;
  std::string unit;
  LaunchConfig config;

  void add(std::string entry, std::int64_t blocks, int shared = shared_bytes) const {
    add_launch(plan, {.unit = unit, .entry = std::move(entry), .config = config, .block = threads, .shared_bytes = shared},
               blocks);
  }
};

Plan lay_out_forward(const Problem& problem) {
  Plan plan{.block_q = block, .block_kv = block};
  reserve_matrix(problem, plan, Region::S, sizeof(float));
  reserve_matrix(problem, plan, Region::P, size_of(problem.dtype));
  const abi::ForwardConfig config{.features = features_of(problem),
                                  .head_dim = static_cast<int>(problem.head_dim),
                                  .head_dim_v = static_cast<int>(problem.head_dim_v),
                                  .block_q = block,
                                  .block_kv = block,
                                  .num_warps = threads / 32};
  const Launcher launches{plan, "standard/forward", launch_config(config)};
  const std::int64_t heads = problem.batch * problem.heads_q;
  launches.add("standard_scores", heads * tiles(problem.seq_q) * tiles(problem.seq_kv));
  launches.add("standard_softmax", heads * tiles(problem.seq_q, rows_per_softmax_block), 0);
  launches.add("standard_output", heads * tiles(problem.seq_q));
  return plan;
}

Plan lay_out_backward(const Problem& problem) {
  Plan plan{.block_q = block, .block_kv = block};
  reserve_row_delta(problem, plan);
  reserve_matrix(problem, plan, Region::S, sizeof(float));
  reserve_matrix(problem, plan, Region::dP, sizeof(float));
  reserve_matrix(problem, plan, Region::P, size_of(problem.dtype));
  reserve_matrix(problem, plan, Region::dS, size_of(problem.dtype));
  add_delta_launch(problem, plan);
  abi::BackwardConfig config = portable_backward_config(problem);
  const Launcher launches{plan, "standard/backward", launch_config(config)};
  config.features = row_features(config.features);
  const Launcher of_rows{plan, "standard/backward", launch_config(config)};
  const std::int64_t heads = problem.batch * problem.heads_q;
  launches.add("standard_scores", heads * tiles(problem.seq_q) * tiles(problem.seq_kv));
  of_rows.add("standard_dp", heads * tiles(problem.seq_q) * tiles(problem.seq_kv));
  launches.add("standard_softmax_backward", heads * tiles(problem.seq_q, rows_per_softmax_block), 0);
  launches.add("standard_dv", problem.batch * problem.heads_kv * tiles(problem.seq_kv));
  launches.add("standard_dk", problem.batch * problem.heads_kv * tiles(problem.seq_kv));
  launches.add("standard_dq", heads * tiles(problem.seq_q));
  add_bias_launch(problem, plan);
  add_program_and_sink_launches(problem, plan);
  return plan;
}

/// The scores have a block for each tile, the softmax one for eight rows.
std::string reject(const Problem& problem) {
  const double blocks = static_cast<double>(problem.batch * problem.heads_q) * static_cast<double>(tiles(problem.seq_q)) *
                        static_cast<double>(std::max<std::int64_t>(tiles(problem.seq_kv), block / rows_per_softmax_block));
  return blocks > std::numeric_limits<int>::max() ? "more than 2^31 tiles" : "";
}

Answer plan_forward(const Request& r) {
  return offer_unless(reject(r.problem), [&] { return lay_out_forward(r.problem); });
}
Answer plan_backward(const Request& r) {
  return offer_unless(reject(r.problem), [&] { return lay_out_backward(r.problem); });
}

}  // namespace

std::span<const KernelEntry> standard_kernels() {
  static constexpr std::string_view requirements =
      "any GPU from sm_70, every dtype and option; memory for the score matrices";
  static const std::array<KernelEntry, 2> rows{KernelEntry{.name = "standard/forward",
                                                           .pass = Pass::standard_forward,
                                                           .device = DeviceKind::cuda,
                                                           .requirements = requirements,
                                                           .proven = run_on_h200,
                                                           .plan = plan_forward},
                                               KernelEntry{.name = "standard/backward",
                                                           .pass = Pass::standard_backward,
                                                           .device = DeviceKind::cuda,
                                                           .requirements = requirements,
                                                           .proven = run_on_h200,
                                                           .plan = plan_backward}};
  return rows;
}

}  // namespace flash_attention::plan
