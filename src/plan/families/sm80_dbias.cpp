#include <algorithm>

#include "plan/families/portable.h"
#include "plan/kernel_config.h"
#include "support/ceil_div.h"

namespace flash_attention::plan {
namespace {

/// A tile of dbias and how it is made: BackwardSm80BiasSteps in kernels/backward/sm80_dbias/steps.cuh.
struct BiasTile {
  static constexpr int num_stages = 3;  // of 64 columns of queries and of keys
  int block;                            // queries and keys
  int num_warps;
  int blocks_per_sm;  // that registers are for

  int shared_bytes() const {
    constexpr int small_bytes = 1024;                       // steps, and what aligns them
    const int floats = 3 * 2 * block + block / 32 * block;  // statistics of three steps, sums of warps
    return num_stages * 2 * block * 128 + floats * static_cast<int>(sizeof(float)) + small_bytes;
  }
  std::int64_t count(const Problem& p) const {
    return ceil_div(p.seq_kv, block) * (p.bias.q_stride == 0 ? 1 : ceil_div(p.seq_q, block)) *
           (p.bias.head_stride == 0 ? 1 : p.heads_q) * (p.bias.batch_stride == 0 ? 1 : p.batch);
  }
};

/// Large tiles read less: a row of Q or dO once for so many keys. A warp has 32 x 64 elements of one, which takes all
/// registers: none are left for other options of scores. Small ones, too, where large ones are too few for all SMs.
BiasTile bias_tile(const Problem& p, const abi::Features& f, const DeviceInfo& device) {
  const BiasTile large{.block = 128, .num_warps = 8, .blocks_per_sm = 1};
  if (f.softcap || f.alibi || f.dropout || f.mask || f.has_tile_map() || f.score_program)
    return {.block = 64, .num_warps = 4, .blocks_per_sm = 2};
  if (large.shared_bytes() > device.shared_bytes || large.count(p) < device.num_sms)
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

}  // namespace flash_attention::plan
