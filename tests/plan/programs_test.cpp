// A program is compiled once: for all lengths, heads and batches, and for all numbers that it is given.
#include <gtest/gtest.h>

#include <set>

#include "flash_attention/attention.h"

namespace flash_attention {
namespace {

const char* const documents =
    "t0 = tensor int32 1\nv0 = load t0 i\nv1 = load t0 j\nv2 = eq v0 v1\nv3 = ge i j\nv4 = and v2 v3\nvisible = v4\n";
const char* const prefix = "s0 = scalar int\nv0 = lt j s0\nv1 = ge i j\nv2 = or v0 v1\nvisible = v2\n";
const char* const distance =
    "t0 = tensor float32 1\nv0 = sub i j\nv1 = float v0\nv2 = load t0 h\nv3 = mul v1 v2\nv4 = add score v3\n"
    "v5 = ge i j\nscore = v4\nvisible = v5\n";

const DeviceInfo hopper_gpu{.device = {.kind = DeviceKind::cuda},
                            .name = "GPU",
                            .arch = 90,
                            .num_sms = 132,
                            .shared_bytes = 232448,
                            .l2_bytes = 50 << 20,
                            .memory_bytes = 1ll << 37};

/// What the kernels of a plan are compiled for.
std::set<std::string> compiled_for(const Plan& plan) {
  std::set<std::string> found;
  for (const Launch& launch : plan.launches) {
    found.insert(launch.unit + " " + launch.entry + " " + to_source(launch.config) + " " + std::to_string(launch.block) +
                 " " + std::to_string(launch.min_blocks_per_sm) + "\n" + launch.prelude);
  }
  return found;
}

Problem of_size(const char* program, std::int64_t batch, std::int64_t heads, std::int64_t seq) {
  Problem p{.batch = batch, .seq_q = seq, .seq_kv = seq, .heads_q = heads, .heads_kv = heads, .head_dim = 128};
  p.dtype = Dtype::bfloat16;
  p.program = program;
  if (p.program.starts_with("t0")) p.program_sizes[0] = {program == distance ? heads : seq};
  return p;
}

TEST(Programs, KnownOnesOfAnotherShapeNeedNoOtherKernel) {
  for (const char* program : {documents, prefix, distance}) {
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      const std::set<std::string> known = compiled_for(make_plan(of_size(program, 1, 16, 8192), pass, hopper_gpu));
      for (const std::int64_t seq : {130, 1000, 2048, 5000, 16384, 100000}) {
        for (const std::int64_t heads : {1, 8, 64}) {
          for (const std::int64_t batch : {1, 3, 32}) {
            const Plan plan = make_plan(of_size(program, batch, heads, seq), pass, hopper_gpu);
            EXPECT_EQ(compiled_for(plan), known) << batch << " x " << heads << " x " << seq << ", " << plan.kernel;
          }
        }
      }
    }
  }
}

/// What no program is in, all share.
TEST(Programs, ThePreparationOfBackwardIsTheSameForAll) {
  const auto prepared = [](const char* program) {
    const Plan plan = make_plan(of_size(program, 1, 16, 8192), Pass::backward, hopper_gpu);
    for (const std::string& kernel : compiled_for(plan)) {
      if (kernel.starts_with("backward/sm90/prepare ")) return kernel;
    }
    return std::string();
  };
  EXPECT_NE(prepared(documents), "");
  EXPECT_EQ(prepared(documents), prepared(prefix));
}

/// The map, which comes first, sets the counter to 0 by which blocks take their tiles.
TEST(Programs, TheMapOfTilesZeroesTheCounter) {
  const Plan plan = make_plan(of_size(documents, 1, 16, 8192), Pass::forward, hopper_gpu);
  ASSERT_EQ(plan.launches.size(), 2u);
  for (const Launch& launch : plan.launches)
    EXPECT_NE(to_source(launch.config).find(".dynamic_scheduler = true"), std::string::npos) << launch.unit;
  EXPECT_EQ(plan.zeroed_bytes, 0u);
  EXPECT_GE(plan.workspace_bytes, sizeof(unsigned));
  EXPECT_FALSE(plan.launches[0].begins_early);
  EXPECT_TRUE(plan.launches[1].begins_early);
}

}  // namespace
}  // namespace flash_attention
