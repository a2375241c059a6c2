#include "plan/families/portable.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "plan/features.h"
#include "plan/kernel_config.h"
#include "plan/kernel_table.h"
#include "plan/program.h"
#include "plan/workspace.h"

namespace flash_attention::plan {
namespace {

constexpr int block = 64;     // tile::block_rows
constexpr int num_warps = 8;  // tile::product_threads / 32

std::int64_t tiles(std::int64_t rows) { return (rows + block - 1) / block; }

Plan lay_out_forward(const Problem& problem) {
  Plan plan{.block_q = block, .block_kv = block};
  const abi::ForwardConfig config{.features = forward_features(with_map(features_of(problem))),
                                  .head_dim = static_cast<int>(problem.head_dim),
                                  .head_dim_v = static_cast<int>(problem.head_dim_v),
                                  .block_q = block,
                                  .block_kv = block,
                                  .num_warps = num_warps};
  add_max_logit_launch(problem, plan);
  add_launch(plan,
             {.unit = "forward/portable",
              .entry = "forward_portable",
              .config = launch_config(config),
              .block = 32 * num_warps,
              .shared_bytes = portable_shared_bytes},
             tiles(problem.seq_q) * problem.heads_q * problem.batch);
  add_key_mass_launch(problem, plan);
  return plan;
}

Plan lay_out_backward(const Problem& problem) {
  Plan plan{.block_q = block, .block_kv = block};
  const LaunchConfig config = launch_config(portable_backward_config(problem));
  reserve_row_delta(problem, plan);
  add_delta_launch(problem, plan);
  add_launch(plan,
             {.unit = "backward/portable",
              .entry = "backward_portable_dkv",
              .config = config,
              .block = 32 * num_warps,
              .shared_bytes = portable_shared_bytes},
             tiles(problem.seq_kv) * problem.heads_kv * problem.batch);
  add_launch(plan,
             {.unit = "backward/portable",
              .entry = "backward_portable_dq",
              .config = config,
              .block = 32 * num_warps,
              .shared_bytes = portable_shared_bytes},
             tiles(problem.seq_q) * problem.heads_q * problem.batch);
  add_bias_launch(problem, plan);
  add_program_and_sink_launches(problem, plan);
  return plan;
}

}  // namespace

abi::BackwardConfig portable_backward_config(const Problem& problem) {
  const abi::Features features = with_map(features_of(problem));
  return {.features = features,
          .head_dim = static_cast<int>(problem.head_dim),
          .head_dim_v = static_cast<int>(problem.head_dim_v),
          .block_q = block,
          .block_kv = block,
          .num_warps = num_warps,
          .dq_mode = abi::DqMode::separate_kernel,
          .dbias = features.bias,
          .dsink = features.sink};
}

std::string reject_grid(const Problem& problem) {
  const double blocks = static_cast<double>(tiles(std::max(problem.seq_q, problem.seq_kv))) *
                        static_cast<double>(problem.heads_q) * static_cast<double>(problem.batch);
  return blocks > std::numeric_limits<int>::max() ? "more than 2^31 tiles" : "";
}

void add_launch(Plan& plan, Launch launch, std::int64_t blocks) {
  if (blocks == 0) return;
  launch.grid = {static_cast<int>(blocks), 1, 1};
  if (plan.launches.empty()) plan.launches.reserve(4);  // few plans have more
  plan.launches.push_back(std::move(launch));
}

void add_max_logit_launch(const Problem& problem, Plan& plan) {
  if (!problem.return_max_logit) return;
  const abi::ForwardConfig config{.num_warps = num_warps};
  add_launch(plan,
             {.unit = "forward/max_logit",
              .entry = "forward_clear_max_logit",
              .config = launch_config(config),
              .block = 32 * num_warps},
             (problem.heads_q * problem.batch + 32 * num_warps - 1) / (32 * num_warps));
}

void add_key_mass_launch(const Problem& problem, Plan& plan) {
  if (!problem.return_key_mass) return;
  abi::ForwardConfig config{.features = with_map(features_of(problem)),
                            .head_dim = static_cast<int>(problem.head_dim),
                            .head_dim_v = static_cast<int>(problem.head_dim),
                            .block_q = block,
                            .block_kv = block,
                            .num_warps = num_warps};
  config.features = key_mass_features(config.features);
  add_launch(plan,
             {.unit = "forward/key_mass",
              .entry = "forward_key_mass",
              .config = launch_config(config),
              .block = 32 * num_warps,
              .shared_bytes = portable_shared_bytes},
             tiles(problem.seq_kv) * problem.heads_q * problem.batch);
}

void reserve_row_delta(const Problem& problem, Plan& plan) {
  const std::int64_t rows = problem.packed ? problem.total_q : problem.batch * problem.seq_q;
  reserve(plan, abi::BackwardRegion::delta, rows * problem.heads_q * std::int64_t{sizeof(float)});
}

void add_delta_launch(const Problem& problem, Plan& plan) {
  // Only the features that it reads, so that fewer kernels are compiled.
  abi::BackwardConfig config = portable_backward_config(problem);
  const abi::Features all = config.features;
  config.features = row_features(all);
  config.features.entropy = all.entropy;
  config.features.sink = all.entropy && all.sink;
  config.dbias = config.dsink = false;
  // packed: also clears gradients past the last sequence, so it needs these
  if (!problem.packed) config.head_dim = config.head_dim_v;
  add_launch(
      plan, {.unit = "backward/delta", .entry = "backward_delta", .config = launch_config(config), .block = 32 * num_warps},
      std::max<std::int64_t>(tiles(problem.seq_q) * problem.heads_q * problem.batch,
                             problem.packed && problem.batch > 0 ? 1 : 0));  // packed: also clears keys in no sequence
  if (!all.key_mass) return;
  abi::BackwardConfig terms = portable_backward_config(problem);
  terms.dbias = terms.dsink = terms.features.dropout = terms.features.sink = terms.features.entropy = false;
  terms.head_dim_v = terms.head_dim;
  add_launch(plan,
             {.unit = "backward/mass_terms",
              .entry = "backward_mass_terms",
              .config = launch_config(terms),
              .block = 32 * num_warps,
              .shared_bytes = portable_shared_bytes},
             tiles(problem.seq_q) * problem.heads_q * problem.batch);
}

void add_bias_launch(const Problem& problem, Plan& plan) {
  add_bias_launch(problem, "backward/dbias", "backward_dbias", plan);
}

void add_bias_launch(const Problem& problem, std::string unit, std::string entry, Plan& plan) {
  const abi::BackwardConfig config = portable_backward_config(problem);
  if (!config.dbias) return;
  const std::int64_t kept = (problem.bias.q_stride == 0 ? 1 : tiles(problem.seq_q)) *
                            (problem.bias.head_stride == 0 ? 1 : problem.heads_q) *
                            (problem.bias.batch_stride == 0 ? 1 : problem.batch);
  add_launch(plan,
             {.unit = std::move(unit),
              .entry = std::move(entry),
              .config = launch_config(config),
              .block = 32 * num_warps,
              .shared_bytes = portable_shared_bytes},
             tiles(problem.seq_kv) * kept);
}

void add_program_and_sink_launches(const Problem& problem, Plan& plan) {
  add_program_gradients(problem, portable_backward_config(problem), plan);
  add_sink_launch(problem, "backward/delta", "backward_dsink", plan);
}

void add_sink_launch(const Problem& problem, std::string unit, std::string entry, Plan& plan) {
  if (!portable_backward_config(problem).dsink) return;
  // the kernel reads nothing else
  abi::BackwardConfig config{.features = {.packed = problem.packed, .seqused_q = problem.seqused_q}};
  config.dq_mode = abi::DqMode::separate_kernel;
  add_launch(plan,
             {.unit = std::move(unit),
              .entry = std::move(entry),
              .config = launch_config(config),
              .block = 32 * num_warps,
              .shared_bytes = 32 * num_warps * static_cast<int>(sizeof(float))},
             problem.heads_q);
}

namespace {

Answer plan_forward(const Request& r) {
  if (fixed_order(r)) return Refusal{"decode/sm80 takes all such calls where bits are invariant"};
  return offer_unless(reject_grid(r.problem), [&] { return lay_out_forward(r.problem); });
}

Answer plan_backward(const Request& r) {
  return offer_unless(reject_grid(r.problem), [&] { return lay_out_backward(r.problem); });
}

}  // namespace

std::span<const KernelEntry> portable_kernels() {
  static constexpr std::string_view requirements = "any GPU from sm_70, every dtype and option";
  static const std::array<KernelEntry, 2> rows{
      KernelEntry{.name = "forward/portable",
                  .pass = Pass::forward,
                  .device = DeviceKind::cuda,
                  .requirements = requirements,
                  .takes = {.pages = true,
                            .left_padding = true,
                            .invariant = true,
                            .hidden_rows = true,
                            .block_mask = true,
                            .programs = true,
                            .narrow_keys = true,
                            .grouped_keys = true,
                            .narrow_queries = true,
                            .latent = true,
                            .statistics = true,
                            .bit_mask = true,
                            .sequence_windows = true},
                  .proven = run_on_h200,
                  .plan = plan_forward},
      KernelEntry{.name = "backward/portable",
                  .pass = Pass::backward,
                  .device = DeviceKind::cuda,
                  .requirements = requirements,
                  .takes = {.hidden_rows = true, .block_mask = true, .programs = true, .statistics = true},
                  .proven = run_on_h200,
                  .plan = plan_backward}};
  return rows;
}

}  // namespace flash_attention::plan
