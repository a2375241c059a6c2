// The launches of rungs with more than one launch, and of every backward rung.

#include <algorithm>
#include <utility>

#include "abi/forward_sm90_fp8.h"
#include "plan/families/portable.h"
#include "plan/features.h"
#include "plan/kernel_config.h"
#include "plan/ladder/ladder.h"
#include "plan/workspace.h"
#include "support/ceil_div.h"

namespace flash_attention::plan {
namespace {

abi::ForwardConfig config_of(const Rung& rung, const Problem& problem) {
  return {.features = features_of(problem),
          .head_dim = static_cast<int>(problem.head_dim),
          .head_dim_v = static_cast<int>(problem.head_dim_v),
          .block_q = rung.block_q,
          .block_kv = rung.block_kv,
          .num_warps = rung.num_warps,
          .num_stages = rung.num_stages};
}

}  // namespace

Launch forward_launch(const Rung& rung, const Problem& problem, std::string entry) {
  return {.unit = unit_of(rung),
          .entry = std::move(entry),
          .config = launch_config(config_of(rung, problem)),
          .block = 32 * rung.num_warps,
          .shared_bytes = rung.shared_bytes ? rung.shared_bytes(rung, static_cast<int>(problem.head_dim)) : 0,
          .min_blocks_per_sm = rung.min_blocks_per_sm};
}

/// The workspace is S, later overwritten by P, fp32 [batch, heads_q, seq_q, seq_kv]. A block computes block_kv elements
/// of a row of S, block_q rows of P, or a row of O.
void add_standard_launches(const Rung& rung, const Problem& problem, Plan& plan) {
  const std::int64_t rows = problem.batch * problem.heads_q * problem.seq_q;
  plan.workspace_bytes = static_cast<std::size_t>(rows * problem.seq_kv) * sizeof(float);
  add_launch(plan, forward_launch(rung, problem, "scores"), rows * ceil_div(problem.seq_kv, rung.block_kv));
  add_launch(plan, forward_launch(rung, problem, "softmax"),
             problem.batch * problem.heads_q * ceil_div(problem.seq_q, rung.block_q));
  add_launch(plan, forward_launch(rung, problem, "output"), rows);
}

/// The workspace is V^T, which the first launch writes, a block for each tile of keys of a head.
void add_narrow_launches(const Rung& rung, const Problem& problem, Plan& plan) {
  const long long places = abi::transposed_places(false, problem.batch, problem.seq_kv, 0, rung.block_kv);
  const std::int64_t heads = problem.batch * problem.heads_kv;
  reserve(plan, abi::ForwardSm90Fp8Region::transposed_V, heads * problem.head_dim * places);
  Launch transpose = forward_launch(rung, problem, "transpose");
  transpose.shared_bytes = 0;
  add_launch(plan, std::move(transpose), heads * ceil_div(problem.seq_kv, rung.block_kv));
  add_launch(plan, forward_launch(rung, problem, "attention"),
             problem.batch * problem.heads_q * ceil_div(problem.seq_q, rung.block_q));
}

/// Splits the keys into as many parts as give two blocks for each SM of a large GPU. The workspace has the parts'
/// outputs, fp32, and their lse. The second launch merges them, a warp a row.
void add_split_launches(const Rung& rung, const Problem& problem, Plan& plan) {
  constexpr std::int64_t enough_blocks = 264;
  const std::int64_t blocks = problem.batch * problem.heads_q * ceil_div(problem.seq_q, rung.block_q);
  const std::int64_t rows = problem.batch * problem.heads_q * problem.seq_q;
  const std::int64_t max_splits = std::max<std::int64_t>(1, ceil_div(problem.seq_kv, rung.block_kv));
  const std::int64_t splits =
      std::min(max_splits, std::max<std::int64_t>(1, enough_blocks / std::max<std::int64_t>(blocks, 1)));
  plan.num_splits = static_cast<int>(splits);
  reserve(plan, abi::LadderSplitRegion::O, splits * rows * problem.head_dim * std::int64_t{sizeof(float)});
  reserve(plan, abi::LadderSplitRegion::lse, splits * rows * std::int64_t{sizeof(float)});
  add_launch(plan, forward_launch(rung, problem, "attention"), blocks * splits);
  add_launch(plan, forward_launch(rung, problem, "merge"), ceil_div(rows, rung.num_warps));
}

namespace {

Launch backward_launch(const Rung& rung, const Problem& problem, std::string entry, int shared_bytes) {
  const abi::BackwardConfig config{.features = features_of(problem),
                                   .head_dim = static_cast<int>(problem.head_dim),
                                   .head_dim_v = static_cast<int>(problem.head_dim_v),
                                   .block_q = rung.block_q,
                                   .block_kv = rung.block_kv,
                                   .num_warps = rung.num_warps,
                                   .num_stages = rung.num_stages,
                                   .dq_mode = abi::DqMode::separate_kernel};
  return {.unit = unit_of(rung),
          .entry = std::move(entry),
          .config = launch_config(config),
          .block = 32 * rung.num_warps,
          .shared_bytes = shared_bytes,
          .min_blocks_per_sm = rung.min_blocks_per_sm};
}

}  // namespace

void add_backward_launches(const Rung& rung, const Problem& problem, Plan& plan) {
  const int shared_bytes = rung.shared_bytes ? rung.shared_bytes(rung, static_cast<int>(problem.head_dim)) : 0;
  const std::int64_t heads_q = problem.batch * problem.heads_q, heads_kv = problem.batch * problem.heads_kv;
  reserve_row_delta(problem, plan);
  add_launch(plan, backward_launch(rung, problem, "delta", 0), heads_q * ceil_div(problem.seq_q, rung.num_warps));
  add_launch(plan, backward_launch(rung, problem, "dq", shared_bytes), heads_q * ceil_div(problem.seq_q, rung.block_q));
  add_launch(plan, backward_launch(rung, problem, "dkv", shared_bytes), heads_kv * ceil_div(problem.seq_kv, rung.block_kv));
}

}  // namespace flash_attention::plan
