// Invariant bits, the planner's part: what decides the order of a row's sums is a function of types, dimensions and
// options, and of nothing that changes from call to call.
#include <gtest/gtest.h>

#include <random>

#include "flash_attention/error.h"
#include "flash_attention/plan.h"
#include "plan/kernel_config.h"

namespace flash_attention {
namespace {

DeviceInfo gpu(int arch, int num_sms, std::int64_t shared_bytes) {
  return {.device = {.kind = DeviceKind::cuda}, .arch = arch, .num_sms = num_sms, .shared_bytes = shared_bytes};
}

/// Kernels that compute in one order: tests/kernels/decode/invariant_emulated_test.cpp.
std::string computes_like(const std::string& kernel) {
  return kernel == "decode/sm90" || kernel == "forward/sm90" ? "decode/sm80" : kernel;
}

/// What the bits of a row depend on: the family, the blocks and segments of keys, and what is done to a score.
std::string order_of(const Plan& plan) {
  std::string text = computes_like(plan.kernel) + " " + std::to_string(plan.block_kv);
  if (plan.launches.empty()) return text;
  const auto* config = plan::config_of<abi::ForwardConfig>(plan.launches.back());
  const abi::Features& f = config->features;
  for (const int member :
       {config->block_kv, config->split_tiles, config->head_dim, config->head_dim_v, static_cast<int>(f.dtype),
        static_cast<int>(f.kv_dtype), static_cast<int>(f.bias_dtype), static_cast<int>(f.softcap), static_cast<int>(f.bias),
        static_cast<int>(f.alibi), static_cast<int>(f.mask), static_cast<int>(f.sink), static_cast<int>(f.dropout)}) {
    text += " " + std::to_string(member);
  }
  return text;
}

/// The same of gradients: what each launch adds up, and in which order.
std::string order_of_gradients(const Plan& plan) {
  std::string text = plan.kernel + " " + std::to_string(plan.num_splits);
  for (const Launch& launch : plan.launches) {
    const auto* config = plan::config_of<abi::BackwardConfig>(launch);
    if (config == nullptr || !launch.unit.starts_with("backward/")) continue;  // maps of tiles
    // Rows that are not finite are repaired, by a launch that may also round dQ: no sums.
    if (launch.unit.ends_with("/repair") || launch.entry == "backward_sm90_convert") continue;
    text += "; " + launch.unit;
    const bool is_delta = launch.unit == "backward/delta";  // its head_dim says what it clears
    for (const int member :
         {config->block_q, config->block_kv, is_delta ? 0 : config->head_dim, config->head_dim_v, config->num_warps,
          static_cast<int>(config->dq_mode), int{config->key_sums}, int{config->split_first},
          int{config->statistics_by_product}, static_cast<int>(config->loop.overlap), int{config->loop.tests_cap}}) {
      text += " " + std::to_string(member);
    }
  }
  return text;
}

class Draw {
 public:
  explicit Draw(unsigned seed) : random_(seed) {}
  template <class T>
  T pick(std::initializer_list<T> values) {
    return values.begin()[random_() % values.size()];
  }
  bool coin() { return random_() % 2 == 0; }

  /// What a sequence's gradients may depend on.
  Problem options_of_gradients() {
    Problem p = options();
    p.causal = coin();
    if (p.bias.present && coin()) p.bias.head_stride = 1 << 20, p.bias.q_stride = 1 << 15;
    if (p.bias.present && coin()) p.bias.batch_stride = 1 << 26;
    if (random_() % 6 == 0) p.hidden_rows = {.bounds = 1};
    if (random_() % 6 == 0) p.mask = {.present = true};
    return p;
  }
  /// The same sequence in another call.
  Problem call_of_gradients(Problem p) {
    p.batch = pick<std::int64_t>({1, 2, 64, 300});
    p.seq_q = p.seq_kv = pick<std::int64_t>({1, 5, 15, 16, 33, 130, 700, 8192});
    if (coin()) p.seq_kv = pick<std::int64_t>({1, 20, 700});
    const std::int64_t heads = pick<std::int64_t>({1, 4, 16});
    p.heads_q *= heads, p.heads_kv *= heads;
    p.seqused_kv = coin(), p.seqused_q = coin();
    if (coin()) p.packed = true, p.total_q = p.batch * p.seq_q, p.total_kv = p.batch * p.seq_kv;
    return p;
  }

  /// What a row's bits may depend on.
  Problem options() {
    Problem p;
    p.invariant = true, p.dtype = pick({Dtype::float32, Dtype::float16, Dtype::bfloat16});
    p.heads_kv = 2, p.heads_q = 2 * pick<std::int64_t>({1, 4, 7, 16});
    p.head_dim = 8 * pick<std::int64_t>({1, 5, 8, 16, 24, 32}), p.head_dim_v = coin() ? p.head_dim : 64;
    p.causal = true;
    if (coin()) p.window_left = 300;
    if (coin()) p.softcap = 20;
    if (coin()) p.sink = true;
    if (random_() % 5 == 0) p.alibi = true;
    if (random_() % 5 == 0) p.bias = {.present = true, .dtype = p.dtype};
    if (random_() % 6 == 0) p.dropout_p = 0.1f;
    if (random_() % 6 == 0) p.scale = -0.3f;
    return p;
  }
  /// The same rows in another call.
  Problem call(Problem p) {
    p.batch = pick<std::int64_t>({1, 2, 64, 300});
    p.seq_q = pick<std::int64_t>({1, 2, 5, 16, 17, 128, 1024});
    p.seq_kv = pick<std::int64_t>({1, 64, 700, 8192, 131072});
    if (p.batch * p.seq_q > 30000) p.seq_q = 16;  // more tiles than a grid has are refused
    p.seqused_kv = coin(), p.seqused_q = coin();
    const bool paged = coin() && p.dropout_p == 0;
    if (paged) {
      p.page_size = pick<std::int64_t>({1, 16, 24, 256}), p.seqused_kv = true;
      p.num_pages = p.batch * (p.seq_kv / p.page_size + 1);
    }
    if (coin()) p.packed = true, p.total_q = p.batch * p.seq_q, p.total_kv = paged ? 0 : p.batch * p.seq_kv;
    return p;
  }

 private:
  std::mt19937 random_;
};

struct Found {
  int pairs = 0;
  int forward_sm90 = 0;
  int decode = 0;
  std::vector<std::string> different;  // pairs whose orders differ, the first few
};

/// Pairs of calls that differ in all that gradients may not depend on.
template <class MakePlan>
Found compare_gradients(int rounds, int calls, const MakePlan& plan_of) {
  Draw draw(11);
  Found found;
  for (int round = 0; round < rounds; ++round) {
    const Problem options = draw.options_of_gradients();
    const int arch = draw.pick({75, 80, 90, 90, 120});
    const std::int64_t shared = arch == 90 ? 232448 : arch == 80 ? 166912 : arch == 75 ? 65536 : 101376;
    std::string first;
    for (int call = 0; call < calls; ++call) {
      const Problem problem = draw.call_of_gradients(options);
      const std::string order = order_of_gradients(plan_of(problem, gpu(arch, draw.pick({1, 16, 132}), shared)));
      if (call == 0) first = order;
      if (call == 0) continue;
      ++found.pairs;
      if (order != first && found.different.size() < 5)
        found.different.push_back(first + " and " + order + ": " + to_string(problem) + " on sm_" + std::to_string(arch));
    }
  }
  return found;
}

/// Pairs of calls that differ in all that a row's bits may not depend on: batch, lengths, heads, pages, packing, SMs.
template <class MakePlan>
Found compare_orders(int rounds, int calls, const MakePlan& plan_of) {
  Draw draw(7);
  Found found;
  for (int round = 0; round < rounds; ++round) {
    const Problem options = draw.options();
    const int arch = draw.pick({75, 80, 90, 90, 90, 120});
    const std::int64_t shared = arch == 90 ? 232448 : arch == 80 ? 166912 : arch == 75 ? 65536 : 101376;
    std::string first;
    for (int call = 0; call < calls; ++call) {
      const Problem problem = draw.call(options);
      const Plan plan = plan_of(problem, gpu(arch, draw.pick({1, 16, 132}), shared));
      const std::string order = order_of(plan);
      found.forward_sm90 += plan.kernel == "forward/sm90" ? 1 : 0;
      found.decode += plan.kernel.starts_with("decode/") ? 1 : 0;
      if (call == 0) first = order;
      if (call == 0) continue;
      ++found.pairs;
      if (order != first && found.different.size() < 5)
        found.different.push_back(first + " and " + order + ": " + to_string(problem) + " on sm_" + std::to_string(arch));
    }
  }
  return found;
}

TEST(PlanInvariant, OrderOfSumsIsThatOfTheOptions) {
  const Found found =
      compare_orders(5000, 21, [](const Problem& p, const DeviceInfo& g) { return make_plan(p, Pass::forward, g); });
  EXPECT_EQ(found.pairs, 100000);
  EXPECT_EQ(found.different, std::vector<std::string>{});
  EXPECT_GT(found.forward_sm90, found.pairs / 100);
  EXPECT_GT(found.decode, found.pairs / 10);
}

TEST(PlanInvariant, OrderOfGradientsIsThatOfTheOptions) {
  const Found found =
      compare_gradients(2000, 21, [](const Problem& p, const DeviceInfo& g) { return make_plan(p, Pass::backward, g); });
  EXPECT_EQ(found.pairs, 40000);
  EXPECT_EQ(found.different, std::vector<std::string>{});
}

TEST(PlanInvariant, APlantedDependenceOfGradientsIsFound) {
  const auto planted = [](Problem p, const DeviceInfo& g) {
    p.invariant = false, p.deterministic = true;
    return make_plan(p, Pass::backward, g);
  };
  EXPECT_FALSE(compare_gradients(200, 21, planted).different.empty());
}

/// The comparison finds a tile that depends on the batch.
TEST(PlanInvariant, APlantedDependenceIsFound) {
  const auto planted = [](const Problem& p, const DeviceInfo& g) {
    Plan plan = make_plan(p, Pass::forward, g);
    if (p.batch > 64) plan.block_kv /= 2;
    return plan;
  };
  EXPECT_FALSE(compare_orders(20, 21, planted).different.empty());
}

TEST(PlanInvariant, OrderOfSumsOnACpuIsThatOfTheOptions) {
  Draw draw(9);
  for (int round = 0; round < 100; ++round) {
    const Problem options = draw.options();
    std::string first;
    for (int call = 0; call < 12; ++call) {
      const Problem problem = draw.call(options);
      SCOPED_TRACE(to_string(problem));
      const Plan plan = make_plan(problem, Pass::forward, {.isa = CpuIsa::amx, .threads = draw.pick({1, 2, 64})});
      EXPECT_EQ(plan.kernel, "cpu/prefill");
      EXPECT_EQ(plan.num_splits, 1);
      if (call == 0) first = order_of(plan);
      EXPECT_EQ(order_of(plan), first);
    }
  }
}

TEST(PlanInvariant, SplitsFollowFromTheHeadDimension) {
  for (const std::int64_t head_dim : {64, 72, 128, 256}) {
    Problem p{.seq_q = 1, .seq_kv = 9000, .heads_q = 8, .heads_kv = 2, .head_dim = head_dim, .dtype = Dtype::bfloat16};
    p.invariant = true;
    const Plan plan = make_plan(p, Pass::forward, gpu(90, 132, 232448));
    EXPECT_EQ(plan::config_of<abi::ForwardConfig>(plan.launches[0])->split_tiles * plan.block_kv,
              head_dim == 64 || head_dim == 256 ? 2048 : 1024);
  }
}

/// What decode/sm80 has not at all is not refused: forward/portable takes it, whatever the sizes.
TEST(PlanInvariant, OptionsThatDecodeHasNotAreTaken) {
  Problem base{.seq_q = 3, .seq_kv = 70, .heads_q = 4, .heads_kv = 2, .head_dim = 64, .dtype = Dtype::bfloat16};
  base.invariant = true;
  const auto with = [&](auto change) {
    Problem p = base;
    change(p);
    return p;
  };
  for (const Problem& p : {with([](Problem& o) { o.program = "v = mul score 2.0\nscore = v\n"; }),
                           with([](Problem& o) { o.q_dtype = o.kv_dtype = Dtype::float8_e4m3; }),
                           with([](Problem& o) { o.hidden_rows.bounds = 1; }), with([](Problem& o) {
                             o.block_mask = {64, 64, 0, 0, 2};
                           })}) {
    for (const int arch : {80, 90}) EXPECT_EQ(make_plan(p, Pass::forward, typical_gpu(arch)).kernel, "forward/portable");
  }
}

TEST(PlanInvariant, RefusesWhatWouldBreakIt) {
  Problem p{.seq_q = 1, .seq_kv = 524288, .heads_q = 8, .heads_kv = 8, .head_dim = 64, .dtype = Dtype::bfloat16};
  p.invariant = true;
  EXPECT_EQ(make_plan(p, Pass::forward, gpu(90, 132, 232448)).kernel, "decode/sm90");
  EXPECT_THROW(make_plan(p, Pass::forward, gpu(90, 132, 232448), "forward/sm80"), Error);
  EXPECT_THROW(make_plan(p, Pass::forward, {}, "cpu/decode"), Error);
  p.seq_kv += 1;
  EXPECT_THROW(make_plan(p, Pass::forward, gpu(90, 132, 232448)), Error);
  p.seq_kv = 524288, p.seq_q = 524288, p.batch = 16;  // too many tiles for decode/sm80: no other kernel takes them instead
  EXPECT_THROW(make_plan(p, Pass::forward, gpu(80, 108, 166912)), Error);
  p.seq_q = 64, p.seq_kv = 64;
  EXPECT_EQ(make_plan(p, Pass::backward, gpu(90, 132, 232448)).kernel, "backward/sm90");  // it is about forward
}

}  // namespace
}  // namespace flash_attention
