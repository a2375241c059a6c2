// A program is compiled once: for all lengths, heads and batches, and for all numbers that it is given.
#include <gtest/gtest.h>

#include <set>

#include "abi/workspace.h"
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
      std::set<std::string> known = compiled_for(make_plan(of_size(program, 1, 16, 8192), pass, hopper_gpu));
      known.merge(compiled_for(make_plan(of_size(program, 1, 2, 8192), pass, hopper_gpu)));  // few heads, or very long
      for (const std::int64_t seq : {130, 1000, 2048, 5000, 16384, 100000}) {
        for (const std::int64_t heads : {1, 8, 64}) {
          for (const std::int64_t batch : {1, 3, 32}) {
            const Plan plan = make_plan(of_size(program, batch, heads, seq), pass, hopper_gpu);
            for (const std::string& kernel : compiled_for(plan))
              EXPECT_TRUE(known.contains(kernel)) << batch << " x " << heads << " x " << seq << ": " << kernel;
          }
        }
      }
    }
  }
}

/// Where words were made before, a program needs no kernel but that which makes them.
TEST(Programs, TheForwardKernelOfMasksIsTheSameForAll) {
  const auto attends = [](const char* program) {
    const Plan plan = make_plan(of_size(program, 1, 16, 8192), Pass::forward, hopper_gpu);
    EXPECT_TRUE(plan.launches.back().prelude.empty()) << program;
    return to_source(plan.launches.back().config);
  };
  EXPECT_EQ(attends(prefix), attends("v0 = mod i 3\nv1 = mod j 3\nv2 = eq v0 v1\nvisible = v2\n"));
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
  const Plan plan = make_plan(of_size(documents, 1, 2, 8192), Pass::forward, hopper_gpu);
  ASSERT_EQ(plan.launches.size(), 2u);
  for (const Launch& launch : plan.launches)
    EXPECT_NE(to_source(launch.config).find(".dynamic_scheduler = true"), std::string::npos) << launch.unit;
  EXPECT_EQ(plan.zeroed_bytes, 0u);
  EXPECT_GE(plan.workspace_bytes, sizeof(unsigned));
  EXPECT_FALSE(plan.launches[0].programmatic_launch);
  EXPECT_TRUE(plan.launches[1].programmatic_launch);
}

/// A prepared mask is kept elsewhere: the workspace ends where it began, with the counter and all that is no mask before
/// it.
TEST(Programs, WhatTheMapMakesIsTheEndOfTheWorkspace) {
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    for (const std::int64_t heads : {2, 16}) {
      Problem p = of_size(documents, 1, heads, 8192);
      if (pass == Pass::backward) {  // with sums of a gradient
        p.program =
            "t0 = tensor float32 1\nv0 = load t0 i\nv1 = mul score v0\nv2 = mod j 3\nv3 = eq v2 0\n"
            "score = v1\nvisible = v3\n";
        p.program_gradients = 1;
      }
      const Plan plan = make_plan(p, pass, hopper_gpu);
      ASSERT_TRUE(plan.mask.present);
      EXPECT_EQ(plan.launches[0].unit, "mask/tile_map");
      EXPECT_EQ(plan.mask.zeroed_bytes, pass == Pass::forward ? sizeof(unsigned) : 0);
      const bool words = pass == Pass::forward && heads == 16;
      const auto begin = static_cast<std::int64_t>(plan.mask.begin);
      const auto offset = [&](auto region) { return plan.workspace_offsets[static_cast<std::size_t>(region)]; };
      EXPECT_EQ(words, offset(abi::SharedRegion::masks) > begin);
      EXPECT_EQ(begin, words ? offset(abi::ForwardSm90Region::mask_words) : offset(abi::SharedRegion::masks));
      for (std::size_t n = 0; n < plan.workspace_offsets.size(); ++n) {
        const bool of_masks = n == static_cast<std::size_t>(abi::SharedRegion::masks) ||
                              (words && n == static_cast<std::size_t>(abi::ForwardSm90Region::mask_words));
        EXPECT_TRUE(of_masks || plan.workspace_offsets[n] < begin) << n;
      }
      EXPECT_LT(plan.mask.begin, plan.workspace_bytes);
      const std::string found_out =
          std::to_string(plan.workspace_bytes - plan.mask.begin) + " of them what the first launch";
      EXPECT_NE(to_string(plan).find(found_out), std::string::npos) << to_string(plan);
    }
  }
  EXPECT_FALSE(make_plan(of_size("", 1, 16, 8192), Pass::forward, hopper_gpu).mask.present);
}

TEST(Programs, WordsAreMadeOnceWhereHeadsShareThem) {
  const auto makes_words = [](const Problem& p) {
    const Plan plan = make_plan(p, Pass::forward, hopper_gpu);
    EXPECT_EQ(plan.launches.size(), 2u);
    const bool made = to_source(plan.launches[1].config).find(".precomputed_mask_bits = true") != std::string::npos;
    EXPECT_EQ(made, to_source(plan.launches[0].config).find(".block_kv = ") != std::string::npos);
    EXPECT_EQ(made, plan.workspace_offsets[static_cast<std::size_t>(abi::ForwardSm90Region::mask_words)] != 0);
    return made;
  };
  EXPECT_TRUE(makes_words(of_size(documents, 1, 16, 8192)));
  EXPECT_TRUE(makes_words(of_size(documents, 4, 2, 1000)));
  EXPECT_FALSE(makes_words(of_size(documents, 1, 7, 8192))) << "few heads";
  EXPECT_FALSE(makes_words(of_size(documents, 1, 16, 32768))) << "128 MB";
  Problem of_lengths = of_size(documents, 1, 16, 8192);
  of_lengths.key_lengths = true;
  EXPECT_FALSE(makes_words(of_lengths)) << "each sequence has its own last key";
  Problem of_bytes = of_size("", 2, 2, 8192);
  of_bytes.mask = {.present = true, .batch_stride = 2 << 26, .head_stride = 1 << 26, .q_stride = 8192};
  EXPECT_TRUE(makes_words(of_bytes)) << "a boolean mask of each head";
  of_bytes.batch = 9, of_bytes.heads_q = of_bytes.heads_kv = 4;
  EXPECT_FALSE(makes_words(of_bytes)) << "288 MB";
  EXPECT_FALSE(makes_words(of_size("v0 = lt j h\nvisible = v0\n", 1, 16, 8192))) << "heads differ";
}

/// backward/sm90 reads words that a launch behind the map's has made; with few heads, or where they differ, it asks itself.
TEST(Programs, WordsForBackwardAreMadeOnce) {
  const auto makes_words = [](const Problem& p) {
    const Plan plan = make_plan(p, Pass::backward, hopper_gpu);
    const bool made = plan.launches[1].unit == "mask/mask_bits";
    int readers = 0;
    for (const Launch& launch : plan.launches)
      readers += to_source(launch.config).find(".mask_bits = true") != std::string::npos &&
                 launch.unit == "backward/sm90/two_warpgroups";
    EXPECT_EQ(readers, made ? 1 : 0);
    return made;
  };
  EXPECT_TRUE(makes_words(of_size(documents, 1, 16, 8192)));
  EXPECT_TRUE(makes_words(of_size(documents, 1, 16, 16384)));
  EXPECT_FALSE(makes_words(of_size(documents, 1, 16, 16448))) << "more than 32 MB";
  EXPECT_FALSE(makes_words(of_size(documents, 1, 7, 8192))) << "few heads";
  EXPECT_FALSE(makes_words(of_size("v0 = lt j h\nvisible = v0\n", 1, 16, 8192))) << "heads differ";
  Problem of_bytes = of_size("", 2, 2, 8192);
  of_bytes.mask = {.present = true, .batch_stride = 2 << 26, .head_stride = 1 << 26, .q_stride = 8192};
  EXPECT_TRUE(makes_words(of_bytes)) << "a boolean mask of each head";
  of_bytes.deterministic = true;
  EXPECT_FALSE(makes_words(of_bytes)) << "dQ by a kernel of its own";
}

/// Its bytes are read once, for the map and the words.
TEST(Programs, WordsOfABooleanMaskAreMadeWithItsMap) {
  const auto made = [](const Problem& p) {
    const Plan plan = make_plan(p, Pass::forward, hopper_gpu);
    return to_source(plan.launches.back().config).find(".precomputed_mask_bits = true") != std::string::npos;
  };
  Problem p = of_size("", 1, 1, 8192);
  p.mask = {.present = true, .q_stride = 8192};
  EXPECT_TRUE(made(p)) << "one head";
  Problem other = p;
  other.heads_q = other.heads_kv = 8, other.mask.head_stride = 8192 * 8192;
  EXPECT_TRUE(made(other)) << "each head has its own";
  other = p, other.hidden_rows.bounds = 1;
  EXPECT_TRUE(made(other)) << "beside another mask";
  other = p, other.packed = true, other.total_q = other.total_kv = 8192;
  EXPECT_FALSE(made(other)) << "packed";
}

/// Of a narrow window small tiles are computed, whatever the length is.
TEST(Programs, SmallTilesInANarrowWindow) {
  const char* const every_other = "v0 = sub i j\nv1 = mod v0 2\nv2 = eq v1 0\nvisible = v2\n";
  const auto block_q = [](Problem p, std::int64_t reach) {
    p.window_left = p.window_right = reach;
    return make_plan(p, Pass::forward, hopper_gpu).block_q;
  };
  EXPECT_EQ(block_q(of_size(every_other, 1, 16, 8192), 64), 64);
  EXPECT_EQ(block_q(of_size(every_other, 1, 16, 1000), 64), 64);
  EXPECT_EQ(block_q(of_size(every_other, 1, 2, 8192), 64), 128) << "each head makes its words";
  EXPECT_EQ(block_q(of_size(every_other, 1, 16, 8192), 65), 128);
}

}  // namespace
}  // namespace flash_attention
