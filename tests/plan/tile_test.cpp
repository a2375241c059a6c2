#include <gtest/gtest.h>

#include "flash_attention/error.h"
#include "plan/kernel_config.h"

namespace flash_attention::testing {
namespace {

Problem plain(std::int64_t head_dim) {
  Problem problem{.batch = 2, .seq_q = 1000, .seq_kv = 1000, .heads_q = 4, .heads_kv = 4, .head_dim = head_dim};
  problem.dtype = Dtype::float16;
  return problem;
}

std::string refusal(const Problem& problem, Pass pass, int arch, TileSize tile, std::string_view kernel = {}) {
  try {
    return "planned " + make_plan(problem, pass, typical_gpu(arch), kernel, tile).kernel;
  } catch (const Error& error) {
    return error.what();
  }
}

TEST(Tile, IsWhatThePlanHas) {
  for (const int arch : {80, 90}) {
    for (const TileSize tile : {TileSize{64, 64}, {128, 32}, {64, 128}}) {
      const Plan plan = make_plan(plain(64), Pass::forward, typical_gpu(arch), "", tile);
      EXPECT_EQ(plan.kernel, arch == 80 ? "forward/sm80" : "forward/sm90");
      EXPECT_EQ((TileSize{plan.block_q, plan.block_kv}), tile);
      const auto* config = plan::config_of<abi::ForwardConfig>(plan.launches[0]);
      ASSERT_NE(config, nullptr);
      EXPECT_EQ(config->block_q, plan.block_q);
      EXPECT_EQ(config->block_kv, plan.block_kv);
      EXPECT_GE(plan.launches[0].grid[0], 1);
      EXPECT_LE(plan.launches[0].shared_bytes, typical_gpu(arch).shared_bytes);
    }
  }
  const Plan named = make_plan(plain(64), Pass::forward, typical_gpu(90), "forward/sm80", TileSize{32, 96});
  EXPECT_EQ(named.kernel, "forward/sm80");
  EXPECT_EQ(named.block_q, 32);
}

TEST(Tile, IsRefusedByNameWhereItDoesNotFit) {
  const auto has = [](const std::string& text, const char* part) { return text.find(part) != std::string::npos; };
  EXPECT_TRUE(has(refusal(plain(64), Pass::forward, 80, {100, 64}), "tile: got (100, 64), allowed are 32, 64 and 128"));
  EXPECT_TRUE(has(refusal(plain(64), Pass::forward, 90, {64, 48}, "forward/sm90"), "allowed are 32, 64 and 128 keys"));
  EXPECT_TRUE(has(refusal(plain(128), Pass::forward, 90, {192, 64}, "forward/sm90"), "up to a head_dim of 64"));
  EXPECT_TRUE(has(refusal(plain(256), Pass::forward, 86, {128, 128}, "forward/sm80"), "bytes of shared memory, there are"));
  EXPECT_TRUE(has(refusal(plain(64), Pass::backward, 80, {64, 64}, "backward/portable"),
                  "backward/portable: its tile cannot be set"));
  EXPECT_TRUE(has(refusal(plain(64), Pass::backward, 80, {64, 32}, "backward/sm80"), "allowed are 64 and 128 queries"));
  EXPECT_TRUE(has(refusal(plain(64), Pass::backward, 90, {128, 128}, "backward/sm90"), "allowed are 64 queries and 128"));
  EXPECT_TRUE(has(refusal(plain(64), Pass::forward, 90, {0, 64}), "tile: got (0, 64), allowed: queries and keys"));
  Problem masked = plain(64);
  masked.hidden_rows.bounds = 1;
  EXPECT_TRUE(has(refusal(masked, Pass::forward, 80, {64, 96}, "forward/sm80"), "blocks of 64 keys"));
}

/// Heads wider than 256: two blocks share the keys they load where both see them from the first on and few rows are lost.
TEST(Tile, OfWideHeadsIsAPairOfBlocksWhereTheyShareKeys) {
  struct Choice {
    const char* name;
    void (*change)(Problem&);
    int block_q;
  };
  for (const Choice& choice :
       {Choice{"full", [](Problem&) {}, 128}, Choice{"causal", [](Problem& p) { p.causal = true; }, 128},
        Choice{"alibi", [](Problem& p) { p.alibi = true; }, 64},
        Choice{"window", [](Problem& p) { p.window_left = 100; }, 64},
        Choice{"mask", [](Problem& p) { p.mask.present = true; }, 64},
        Choice{"packed", [](Problem& p) { p.packed = true, p.total_q = p.total_kv = 2000; }, 64},
        Choice{"three tiles", [](Problem& p) { p.seq_q = 192; }, 64},
        Choice{"one tile", [](Problem& p) { p.seq_q = 64; }, 64}}) {
    Problem problem = plain(512);
    choice.change(problem);
    const Plan plan = make_plan(problem, Pass::forward, typical_gpu(90), "forward/sm90");
    EXPECT_EQ(plan.block_q, choice.block_q) << choice.name;
    EXPECT_EQ(plan.launches.back().cluster, choice.block_q / 64) << choice.name;
    EXPECT_EQ(plan.launches.back().grid[0] % plan.launches.back().cluster, 0) << choice.name;
  }
  Problem problem = plain(512);
  problem.alibi = true;
  EXPECT_NE(refusal(problem, Pass::forward, 90, {128, 128}, "forward/sm90").find("two blocks share the keys"),
            std::string::npos);
}

}  // namespace
}  // namespace flash_attention::testing
