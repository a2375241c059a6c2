#include "plan/families/portable.h"
#include "plan/features.h"
#include "plan/kernel_config.h"
#include "plan/ladder/ladder.h"
#include "support/ceil_div.h"

namespace flash_attention::plan {
namespace {

Launch launch_of(const Rung& rung, const Problem& problem, std::string entry, int shared_bytes) {
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
  add_launch(plan, launch_of(rung, problem, "delta", 0), heads_q * ceil_div(problem.seq_q, rung.num_warps));
  add_launch(plan, launch_of(rung, problem, "dq", shared_bytes), heads_q * ceil_div(problem.seq_q, rung.block_q));
  add_launch(plan, launch_of(rung, problem, "dkv", shared_bytes), heads_kv * ceil_div(problem.seq_kv, rung.block_kv));
}

}  // namespace flash_attention::plan
