#include <gtest/gtest.h>

#include "flash_attention/error.h"
#include "plan/kernel_config.h"
#include "plan/request.h"

namespace flash_attention::testing {
namespace {

Problem plain(std::int64_t head_dim) {
  Problem problem{.batch = 2, .seq_q = 1000, .seq_kv = 1000, .heads_q = 4, .heads_kv = 4, .head_dim = head_dim};
  problem.dtype = Dtype::float16;
  return problem;
}

std::string refusal(const Problem& problem, Pass pass, int arch, const std::string& asked) {
  try {
    return "planned " + make_plan(problem, pass, typical_gpu(arch), asked).kernel;
  } catch (const Error& error) {
    return error.what();
  }
}

TEST(Tile, IsReadFromTheNameOfAKernel) {
  EXPECT_EQ(plan::parse_kernel("forward/sm80").kernel, "forward/sm80");
  EXPECT_FALSE(plan::parse_kernel("forward/sm80").tile.has_value());
  const plan::NamedKernel request = plan::parse_kernel("forward/sm80@64x128");
  EXPECT_EQ(request.kernel, "forward/sm80");
  EXPECT_EQ(request.tile->block_q, 64);
  EXPECT_EQ(request.tile->block_kv, 128);
  EXPECT_EQ(plan::parse_kernel("@64x32").kernel, "");
  for (const char* wrong : {"@", "@64", "@64x", "@x64", "@64x64x", "@0x64", "@64x-1", "@64 x64", "@99999999999x64"}) {
    EXPECT_THROW(plan::parse_kernel(wrong), Error) << wrong;
  }
}

TEST(Tile, IsWhatThePlanHas) {
  for (const int arch : {80, 90}) {
    for (const char* asked : {"@64x64", "@128x32", "@64x128"}) {
      const Plan plan = make_plan(plain(64), Pass::forward, typical_gpu(arch), asked);
      EXPECT_EQ(plan.kernel, arch == 80 ? "forward/sm80" : "forward/sm90");
      const std::string text = "@" + std::to_string(plan.block_q) + "x" + std::to_string(plan.block_kv);
      EXPECT_EQ(text, asked);
      const auto* config = plan::config_of<abi::ForwardConfig>(plan.launches[0]);
      ASSERT_NE(config, nullptr);
      EXPECT_EQ(config->block_q, plan.block_q);
      EXPECT_EQ(config->block_kv, plan.block_kv);
      EXPECT_GE(plan.launches[0].grid[0], 1);
      EXPECT_LE(plan.launches[0].shared_bytes, typical_gpu(arch).shared_bytes);
    }
  }
  const Plan named = make_plan(plain(64), Pass::forward, typical_gpu(90), "forward/sm80@32x96");
  EXPECT_EQ(named.kernel, "forward/sm80");
  EXPECT_EQ(named.block_q, 32);
}

TEST(Tile, IsRefusedByNameWhereItDoesNotFit) {
  const auto has = [](const std::string& text, const char* part) { return text.find(part) != std::string::npos; };
  EXPECT_TRUE(has(refusal(plain(64), Pass::forward, 80, "@100x64"), "tile: got (100, 64), allowed are 32, 64 and 128"));
  EXPECT_TRUE(has(refusal(plain(64), Pass::forward, 90, "forward/sm90@64x48"), "allowed are 32, 64 and 128 keys"));
  EXPECT_TRUE(has(refusal(plain(128), Pass::forward, 90, "forward/sm90@192x64"), "up to a head_dim of 64"));
  EXPECT_TRUE(has(refusal(plain(256), Pass::forward, 86, "forward/sm80@128x128"), "bytes of shared memory, there are"));
  EXPECT_TRUE(has(refusal(plain(64), Pass::backward, 80, "backward/sm80@64x64"), "backward/sm80: its tile cannot be set"));
  EXPECT_TRUE(has(refusal(plain(64), Pass::forward, 90, "@64"), "tile: got '64'"));
  Problem masked = plain(64);
  masked.hidden_rows.bounds = 1;
  EXPECT_TRUE(has(refusal(masked, Pass::forward, 80, "forward/sm80@64x96"), "blocks of 64 keys"));
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
  EXPECT_NE(refusal(problem, Pass::forward, 90, "forward/sm90@128x128").find("two blocks share the keys"),
            std::string::npos);
}

}  // namespace
}  // namespace flash_attention::testing
