#include "plan/gpu_facts.h"

#include <gtest/gtest.h>

#include "flash_attention/error.h"
#include "flash_attention/runtime.h"
#include "plan/kernel_table.h"
#include "support/compile.h"

namespace flash_attention::testing {
namespace {

std::vector<Problem> problems() {
  std::vector<Problem> all;
  for (const Dtype dtype : {Dtype::float32, Dtype::float16, Dtype::bfloat16}) {
    for (const std::int64_t head_dim : {8, 64, 72, 128, 192, 256}) {
      for (const std::int64_t seq_q : {1, 64, 1000}) {
        for (const bool deterministic : {false, true}) {
          Problem problem{.batch = 2, .seq_q = seq_q, .seq_kv = 1000, .heads_q = 8, .heads_kv = 2, .head_dim = head_dim};
          problem.dtype = dtype;
          problem.causal = problem.deterministic = deterministic;
          all.push_back(problem);
        }
      }
    }
  }
  return all;
}

/// Instructions that one architecture alone has.
bool needs_sm90(const Launch& launch) {
  return launch.unit.find("sm90") != std::string::npos || launch.unit.find("wgmma") != std::string::npos;
}

TEST(GpuFacts, EveryPlanFitsItsArchitecture) {
  for (const plan::GpuFacts& facts : plan::gpu_facts()) {
    const DeviceInfo gpu = typical_gpu(facts.arch);
    for (const Problem& problem : problems()) {
      for (const Pass pass : {Pass::forward, Pass::backward}) {
        const Plan made = make_plan(problem, pass, gpu);
        SCOPED_TRACE("sm_" + std::to_string(facts.arch) + " " + made.kernel + " for " + to_string(problem));
        for (const Launch& launch : made.launches) {
          EXPECT_LE(launch.shared_bytes, shared_limit(facts.arch));
          EXPECT_TRUE(facts.arch == 90 || !needs_sm90(launch)) << launch.unit;
          EXPECT_TRUE(facts.arch >= 80 || launch.unit.find("sm80") == std::string::npos) << launch.unit;
        }
      }
    }
  }
}

/// By name, too: a kernel that would not compile is refused before anything is compiled.
TEST(GpuFacts, KernelsOfSm90AreRefusedByNameElsewhere) {
  Problem problem{.batch = 1, .seq_q = 256, .seq_kv = 256, .heads_q = 2, .heads_kv = 2, .head_dim = 64};
  problem.dtype = Dtype::bfloat16;
  for (const char* name : {"forward/sm90", "ladder/12_wgmma", "ladder/15_reference_max", "ladder/16_persistent"}) {
    EXPECT_EQ(make_plan(problem, Pass::forward, typical_gpu(90), name).kernel, name);
    for (const int arch : {80, 89, 100, 103, 120}) {
      EXPECT_THROW(make_plan(problem, Pass::forward, typical_gpu(arch), name), Error) << name << " on sm_" << arch;
    }
  }
}

TEST(GpuFacts, SaysWhatIsKnown) {
  EXPECT_NE(describe_path(typical_gpu(90)).find("forward/sm90, backward/sm90"), std::string::npos);
  EXPECT_NE(describe_path(typical_gpu(90)).find("timed on such a GPU"), std::string::npos);
  EXPECT_NE(describe_path(typical_gpu(80)).find("emulator"), std::string::npos);
  EXPECT_NE(describe_path(typical_gpu(120)).find("forward/sm80"), std::string::npos);
  EXPECT_NE(describe_path(typical_gpu(120)).find("never run"), std::string::npos);
  EXPECT_NE(describe_path(typical_gpu(75)).find("forward/portable"), std::string::npos);
  DeviceInfo unknown = typical_gpu(100);
  unknown.arch = 110;
  EXPECT_NE(describe_path(unknown).find("no test covers"), std::string::npos);
  EXPECT_THROW(typical_gpu(77), Error);
}

/// SMs with 100 KB of shared memory and 48 warps: every kernel for many queries has eight warps on one, and no block asks
/// for more than there is.
TEST(GpuFacts, small_sms_are_not_left_with_four_warps) {
  for (const int arch : {86, 89, 120, 121}) {
    const DeviceInfo device = typical_gpu(arch);
    for (const Dtype dtype : {Dtype::bfloat16, Dtype::float16}) {
      for (const std::int64_t head_dim : {32, 40, 64, 80, 96, 128, 160, 192, 224, 256}) {
        for (const bool causal : {false, true}) {
          for (const float softcap : {0.0f, 20.0f}) {
            Problem problem{.batch = 2, .seq_q = 2048, .seq_kv = 2048, .heads_q = 8, .heads_kv = 8, .head_dim = head_dim};
            problem.dtype = dtype, problem.causal = causal, problem.softcap = softcap;
            for (const bool codes : {false, true}) {
              if (codes && (arch == 86 || head_dim % 16 != 0)) continue;
              if (codes) problem.q_dtype = problem.kv_dtype = Dtype::float8_e4m3;
              const Plan plan = make_plan(problem, Pass::forward, device);
              ASSERT_EQ(plan.kernel, codes ? "forward/sm89_fp8" : "forward/sm80") << head_dim;
              const Launch& launch = plan.launches.back();
              const int blocks = (100 << 10) / (launch.shared_bytes + (1 << 10)), warps = blocks * launch.block / 32;
              EXPECT_LE(launch.shared_bytes, device.shared_bytes);
              EXPECT_GE(warps, 8) << head_dim << " on sm_" << arch;
              EXPECT_LE(launch.min_blocks_per_sm * launch.block / 32, 48);
              EXPECT_GE(plan.block_q, 128);
            }
          }
        }
      }
    }
    Problem training{.batch = 2, .seq_q = 2048, .seq_kv = 2048, .heads_q = 8, .heads_kv = 8, .head_dim = 64};
    training.dtype = Dtype::bfloat16;
    EXPECT_EQ(make_plan(training, Pass::backward, device).block_kv, 128);  // half of the additions to dQ that 64 x 64 has
  }
}

}  // namespace
}  // namespace flash_attention::testing
