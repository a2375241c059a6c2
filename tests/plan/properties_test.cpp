// What must hold for the plan of any problem, over thousands of random ones.
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "api/checks/validate.h"
#include "flash_attention/attention.h"
#include "flash_attention/error.h"
#include "plan/kernel_config.h"
#include "plan/kernel_table.h"

namespace flash_attention {
namespace {

class RandomProblems {
 public:
  explicit RandomProblems(unsigned seed) : random_(seed) {}

  Problem next() {
    Problem p;
    p.dtype = pick({Dtype::float32, Dtype::float16, Dtype::bfloat16});
    p.batch = pick<std::int64_t>({0, 1, 1, 2, 3, 64, 700});
    p.seq_q = pick<std::int64_t>({0, 1, 2, 17, 64, 129, 1000, 4096, 100000});
    p.seq_kv = pick<std::int64_t>({0, 1, 5, 64, 127, 1024, 8191, 300000});
    p.heads_kv = pick<std::int64_t>({1, 2, 8});
    p.heads_q = p.heads_kv * pick<std::int64_t>({1, 2, 3, 16});
    p.head_dim = 8 * (1 + static_cast<std::int64_t>(random_() % 32));
    if (coin()) p.head_dim_v = 8 * (1 + static_cast<std::int64_t>(random_() % 32));
    if (coin()) p.causal = true;
    if (coin()) p.alignment = Alignment::top_left;
    if (coin()) p.window_left = static_cast<std::int64_t>(random_() % 500);
    if (coin()) p.window_right = static_cast<std::int64_t>(random_() % 500);
    if (coin()) p.softcap = 20;
    if (coin()) p.alibi = true;
    if (coin()) p.sink = true;
    if (coin()) p.dropout_p = 0.1f;
    if (coin()) p.key_lengths = true;
    if (coin()) p.seqused_kv = true;
    if (coin()) p.deterministic = true;
    if (coin()) p.bias = {.present = true, .dtype = p.dtype, .q_stride = p.seq_kv};
    if (coin()) p.mask = {.present = true, .batch_stride = p.seq_kv};
    if (coin()) {
      p.packed = true;
      const std::int64_t sequences = p.batch == 0 ? 0 : 2;  // no rows where there is no sequence
      p.total_q = p.seq_q * sequences;
      p.total_kv = p.seq_kv * sequences;
    }
    if (coin()) p.q_strides = {p.seq_q * p.heads_q * p.head_dim, p.head_dim, p.seq_q * p.head_dim};
    if (coin()) p.k_strides.head = p.head_dim + 1;  // no multiple of 16 bytes
    return p;
  }

 private:
  bool coin() { return random_() % 4 == 0; }
  template <class T>
  T pick(std::initializer_list<T> values) {
    return values.begin()[random_() % values.size()];
  }
  std::mt19937 random_;
};

const DeviceInfo machines[] = {
    {.device = {}, .name = "CPU", .isa = CpuIsa::avx512, .threads = 2},
    {.device = {.kind = DeviceKind::cuda},
     .name = "H200",
     .arch = 90,
     .num_sms = 132,
     .shared_bytes = 232448,
     .l2_bytes = 50 << 20,
     .memory_bytes = 1ll << 37},
    {.device = {.kind = DeviceKind::cuda},
     .name = "A100",
     .arch = 80,
     .num_sms = 108,
     .shared_bytes = 166912,
     .l2_bytes = 40 << 20,
     .memory_bytes = 1ll << 36},
    {.device = {.kind = DeviceKind::cuda},
     .name = "V100",
     .arch = 70,
     .num_sms = 80,
     .shared_bytes = 98304,
     .l2_bytes = 6 << 20,
     .memory_bytes = 1ll << 34},
    {.device = {.kind = DeviceKind::emulator, .emulated_arch = 80},
     .name = "emulator",
     .arch = 80,
     .num_sms = 4,
     .shared_bytes = 166912},
};
const Pass passes[] = {Pass::forward, Pass::backward, Pass::standard_forward, Pass::standard_backward};

TEST(PlanProperties, EveryProblemHasAPlanThatFitsTheDevice) {
  RandomProblems problems(11);
  for (int round = 0; round < 2000; ++round) {
    const Problem problem = problems.next();
    SCOPED_TRACE(to_string(problem));
    for (const DeviceInfo& device : machines) {
      for (Pass pass : passes) {
        const double scores = static_cast<double>(problem.batch * problem.heads_q) * static_cast<double>(problem.seq_q) *
                              static_cast<double>(problem.seq_kv);
        const bool standard = pass == Pass::standard_forward || pass == Pass::standard_backward;
        if (standard && scores > 0x1p40) continue;  // no device could hold them
        const Plan plan = make_plan(problem, pass, device);
        ASSERT_FALSE(plan.kernel.empty());
        EXPECT_EQ(plan.candidates.back().kernel, plan.kernel);
        EXPECT_TRUE(plan.candidates.back().reason.empty());
        const bool has_work = problem.batch > 0 && problem.seq_q > 0 && problem.seq_kv > 0;
        if (device.device.kind == DeviceKind::cpu) {
          EXPECT_TRUE(plan.launches.empty());
        } else if (has_work) {
          EXPECT_FALSE(plan.launches.empty());
        }
        EXPECT_GE(plan.num_splits, 1);
        for (const Launch& launch : plan.launches) {
          EXPECT_LE(launch.shared_bytes, device.shared_bytes) << launch.entry;
          EXPECT_GE(launch.block, 1);
          EXPECT_LE(launch.block, 1024) << launch.entry;
          EXPECT_GE(launch.grid[0], 0);
          for (int axis : {1, 2}) EXPECT_LE(launch.grid[axis], 65535) << launch.entry << " axis " << axis;
        }
        for (std::int64_t offset : plan.workspace_offsets) {
          EXPECT_GE(offset, 0);
          EXPECT_LE(offset, static_cast<std::int64_t>(plan.workspace_bytes));
        }
      }
    }
  }
}

TEST(PlanProperties, PlansArePure) {
  RandomProblems a(5), b(5);
  for (int round = 0; round < 300; ++round) {
    const Problem x = a.next(), y = b.next();
    ASSERT_EQ(x, y);
    ASSERT_EQ(hash_value(x), hash_value(y));
    for (const DeviceInfo& device : machines)
      EXPECT_EQ(make_plan(x, Pass::backward, device), make_plan(y, Pass::backward, device));
  }
}

TEST(PlanProperties, FlashNeedsNoQuadraticWorkspace) {
  for (const DeviceInfo& device : machines) {
    for (Pass pass : {Pass::forward, Pass::backward, Pass::tangent, Pass::second}) {
      const auto bytes = [&](std::int64_t seq) {
        return make_plan({.seq_q = seq,
                          .seq_kv = seq,
                          .heads_q = 2,
                          .heads_kv = 2,
                          .head_dim = 64,
                          .dtype = Dtype::bfloat16,
                          .causal = true},
                         pass, device)
            .workspace_bytes;
      };
      EXPECT_LE(bytes(65536), 2 * bytes(32768) + 4096) << device.name << ' ' << to_string(pass);
    }
    const auto standard = [&](std::int64_t seq) {
      return make_plan({.seq_q = seq, .seq_kv = seq, .head_dim = 64}, Pass::standard_forward, device).workspace_bytes;
    };
    EXPECT_GE(standard(2048), 3 * standard(1024)) << device.name;  // the baseline really stores the scores
  }
}

TEST(PlanProperties, CapabilityTableIsTrue) {
  RandomProblems problems(23);
  for (int round = 0; round < 500; ++round) {
    const Problem problem = problems.next();
    for (const DeviceInfo& device : machines) {
      for (const plan::KernelEntry& entry : plan::kernel_table()) {
        const DeviceKind kind = device.device.kind == DeviceKind::emulator ? DeviceKind::cuda : device.device.kind;
        if (entry.device != kind) continue;
        const Problem normalised = api::normalise(problem, entry.pass);
        const bool rejects = std::holds_alternative<plan::Refusal>(entry.plan(plan::make_request(normalised, device)));
        try {
          EXPECT_EQ(make_plan(problem, entry.pass, device, entry.name).kernel, entry.name);
          EXPECT_FALSE(rejects) << entry.name;
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::unsupported);
          EXPECT_TRUE(rejects) << entry.name << ": " << error.what();
        }
      }
    }
  }
}

TEST(PlanProperties, KernelNamesAreUniqueAndDescribed) {
  std::set<std::pair<std::string, Pass>> seen;
  for (const KernelSummary& kernel : kernels()) {
    EXPECT_TRUE(seen.insert({kernel.name, kernel.pass}).second) << kernel.name;
    EXPECT_FALSE(kernel.requirements.empty()) << kernel.name;
  }
}

TEST(Normalise, FillsEveryDefault) {
  const Problem p = api::normalise(
      {.batch = 2, .seq_q = 3, .seq_kv = 5, .heads_q = 4, .heads_kv = 2, .head_dim = 16, .causal = true}, Pass::backward);
  EXPECT_EQ(p.head_dim_v, 16);
  EXPECT_EQ(p.window_right, 0);
  EXPECT_FLOAT_EQ(*p.scale, 0.25f);
  EXPECT_EQ(p.q_strides, (Strides{3 * 4 * 16, 4 * 16, 16}));
  EXPECT_EQ(p.k_strides, (Strides{5 * 2 * 16, 2 * 16, 16}));
  EXPECT_EQ(p.total_q, 6);
  EXPECT_EQ(api::normalise(p, Pass::backward), p);
}

TEST(Normalise, DropsAWindowThatHidesNothing) {
  const Problem wide{.seq_q = 10, .seq_kv = 20, .head_dim = 8, .window_left = 30, .window_right = 30};
  EXPECT_EQ(api::normalise(wide, Pass::forward).window_left, -1);
  EXPECT_EQ(api::normalise(wide, Pass::forward).window_right, -1);
  const Problem last_query{.seq_q = 1, .seq_kv = 20, .head_dim = 8, .causal = true};
  EXPECT_EQ(api::normalise(last_query, Pass::forward).window_right, -1);
  Problem first_query = last_query;
  first_query.alignment = Alignment::top_left;
  EXPECT_EQ(api::normalise(first_query, Pass::forward).window_right, 0);
}

TEST(Normalise, DiagonalsOfSquareProblemsAreTheSame) {
  Problem p{.seq_q = 10, .seq_kv = 10, .head_dim = 8, .causal = true, .alignment = Alignment::top_left};
  EXPECT_EQ(api::normalise(p, Pass::forward).alignment, Alignment::bottom_right);
  p.seqused_kv = true;  // then the diagonal follows the lengths
  EXPECT_EQ(api::normalise(p, Pass::forward).alignment, Alignment::top_left);
  p.seqused_kv = false;
  p.seq_kv = 11;
  EXPECT_EQ(api::normalise(p, Pass::forward).alignment, Alignment::top_left);
  p.packed = true;
  p.seq_kv = p.total_q = p.total_kv = 10;
  EXPECT_EQ(api::normalise(p, Pass::forward).alignment, Alignment::top_left);
}

/// The last query does not see the first key, or the first query not the last key.
TEST(Normalise, KeepsAWindowThatHidesOneScore) {
  const Problem left{.seq_q = 10, .seq_kv = 20, .head_dim = 8, .window_left = 18};
  EXPECT_EQ(api::normalise(left, Pass::forward).window_left, 18);
  const Problem right{.seq_q = 10, .seq_kv = 20, .head_dim = 8, .alignment = Alignment::top_left, .window_right = 18};
  EXPECT_EQ(api::normalise(right, Pass::forward).window_right, 18);
}

TEST(Normalise, RefusesAnOutputThatOverlapsItselfByOneElement) {
  Problem p{.seq_q = 4, .seq_kv = 4, .heads_q = 2, .heads_kv = 2, .head_dim = 8};
  p.out_strides = {1000, 16, 8};
  EXPECT_EQ(api::normalise(p, Pass::forward).out_strides.seq, 16);
  p.out_strides.seq = 15;
  EXPECT_THROW(api::normalise(p, Pass::forward), Error);
}

TEST(Arguments, ConfigurationsPrintAsSource) {
  abi::ForwardConfig config{.head_dim = 64, .head_dim_v = 64, .block_q = 128};
  config.features.dtype = abi::Type::bfloat16;
  config.features.window_right = true;
  EXPECT_EQ(to_source(plan::launch_config(config)),
            "ForwardConfig{.features = {.dtype = Type::bfloat16, .window_right = true}, .head_dim = 64, .head_dim_v = 64, "
            ".block_q = 128}");
}

TEST(Flops, CountsVisibleScores) {
  EXPECT_DOUBLE_EQ(flops({.batch = 2, .seq_q = 8, .seq_kv = 8, .heads_q = 3, .heads_kv = 3, .head_dim = 16}, Pass::forward),
                   4.0 * 2 * 3 * 8 * 8 * 16);
  EXPECT_DOUBLE_EQ(flops({.seq_q = 8, .seq_kv = 8, .head_dim = 16, .causal = true}, Pass::forward), 4.0 * (8 * 9 / 2) * 16);
  EXPECT_DOUBLE_EQ(flops({.seq_q = 8, .seq_kv = 8, .head_dim = 16}, Pass::backward), 2.5 * 4.0 * 8 * 8 * 16);
}

}  // namespace
}  // namespace flash_attention
