// Every tile has a block, every row its place in the workspace: counted here, not taken from the planner.
#include <gtest/gtest.h>

#include <map>

#include "flash_attention/attention.h"
#include "plan/kernel_config.h"
#include "plan/workspace.h"

namespace flash_attention {
namespace {

DeviceInfo many_sms(int arch) {  // so many that no grid is cut down to them
  return {.device = {.kind = DeviceKind::cuda},
          .arch = arch,
          .num_sms = 1 << 24,
          .shared_bytes = arch == 90 ? 232448 : 166912,
          .l2_bytes = 50 << 20,
          .memory_bytes = 1ll << 37};
}

Problem problem_of(std::int64_t seq_q, std::int64_t seq_kv) {
  return {
      .batch = 3, .seq_q = seq_q, .seq_kv = seq_kv, .heads_q = 4, .heads_kv = 2, .head_dim = 64, .dtype = Dtype::float16};
}

std::int64_t blocks_for(std::int64_t rows, std::int64_t block) {
  std::int64_t blocks = 0;
  while (blocks * block < rows) ++blocks;
  return blocks;
}

const std::int64_t lengths[] = {1, 2, 63, 64, 65, 127, 128, 129, 130, 191, 192, 193, 255, 256, 257, 1025, 1153, 1300};

TEST(Grids, ForwardHasABlockForEveryTileOfRows) {
  for (const std::int64_t seq_q : lengths) {
    for (const bool causal : {false, true}) {
      Problem p = problem_of(seq_q, 200);
      p.causal = causal;
      for (const auto& [kernel, arch] : {std::pair{"forward/portable", 80}, {"forward/sm80", 80}, {"forward/sm90", 90}}) {
        const Plan plan = make_plan(p, Pass::forward, many_sms(arch), kernel);
        const Launch& launch = plan.launches.at(0);
        const bool pairs = plan::config_of<abi::ForwardConfig>(launch)->pair_tiles;
        const std::int64_t units = blocks_for(blocks_for(seq_q, plan.block_q), pairs ? 2 : 1);
        EXPECT_EQ(launch.grid[0], units * p.heads_q * p.batch) << kernel << " " << seq_q;
      }
    }
  }
}

TEST(Grids, BackwardHasABlockForEveryTileOfKeysAndOfRows) {
  for (const std::int64_t length : lengths) {
    for (const bool deterministic : {false, true}) {
      Problem p = problem_of(length, 1400 - length);
      p.deterministic = deterministic, p.sink = true, p.bias = {.present = true, .head_stride = 2000000, .q_stride = 1400};
      for (const char* kernel : {"backward/portable", "backward/sm80"}) {
        const Plan plan = make_plan(p, Pass::backward, many_sms(80), kernel);
        std::map<std::string, int> grids;
        for (const Launch& launch : plan.launches) grids[launch.entry] = launch.grid[0];
        const auto expect = [&](const char* entry, std::int64_t rows, std::int64_t block, std::int64_t heads) {
          const int expected = static_cast<int>(blocks_for(rows, block) * heads);
          EXPECT_EQ(grids.contains(entry) ? grids[entry] : expected, expected) << entry << " " << length;
        };
        expect("backward_delta", p.seq_q, 64, p.heads_q * p.batch);
        expect("backward_portable_dkv", p.seq_kv, 64, p.heads_kv * p.batch);
        expect("backward_portable_dq", p.seq_q, 64, p.heads_q * p.batch);
        expect("backward_sm80", p.seq_kv, plan.block_kv, p.heads_kv * p.batch);
        expect("backward_sm80_dq", p.seq_q, 128, p.heads_q * p.batch);
        expect("backward_sm80_finish_dq", p.seq_q, plan.block_q, p.heads_q * p.batch);
        expect("backward_clear_sums", p.seq_q, plan.block_q, p.heads_q * p.batch);
        expect("backward_dsink", p.heads_q, 1, 1);
        const std::string dbias = kernel == std::string("backward/sm80") ? "backward_sm80_dbias" : "backward_dbias";
        EXPECT_EQ(grids[dbias], blocks_for(p.seq_kv, 64) * blocks_for(p.seq_q, 64) * p.heads_q) << length;
      }
    }
  }
}

/// backward/sm90 keeps row statistics where sequence b begins at row (first row + 68 b) / 4 * 4 and has room for whole
/// tiles of 64 rows.
TEST(Grids, StatisticsOfBackwardSm90HaveRoomForTheLastTile) {
  using Region = abi::BackwardSm90Region;
  for (const std::int64_t seq_q : lengths) {
    for (const std::int64_t batch : {1, 2, 7}) {
      Problem p = problem_of(seq_q, 300);
      p.batch = batch;
      const Plan plan = make_plan(p, Pass::backward, many_sms(90), "backward/sm90");
      const std::int64_t last_start = ((batch - 1) * seq_q + 68 * (batch - 1)) / 4 * 4;
      const std::int64_t needed = last_start + blocks_for(seq_q, 64) * 64;
      // Heads lie one after another, so the first one's last tile must end before the second's first row.
      const std::int64_t rows_of_head =
          (plan::offset_of(plan, Region::delta) - plan::offset_of(plan, Region::lse2)) / 4 / p.heads_q;
      EXPECT_GE(rows_of_head, needed) << seq_q << " x " << batch;
    }
  }
}

}  // namespace
}  // namespace flash_attention
