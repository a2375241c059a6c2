// forward/sm89_fp8 in the emulator: Q, K and V in 8 bits by mma.sync.
#include <set>

#include "kernels/emulated.h"
#include "support/oracle/narrow.h"
#include "support/oracle/rounding.h"

namespace flash_attention::testing {
namespace {

constexpr const char* code_kernel = "forward/sm89_fp8";

Device emulated_ada(int arch = 89) { return {.kind = DeviceKind::emulator, .emulated_arch = arch}; }

using ForwardSm89Fp8 = ::testing::TestWithParam<Case>;

TEST_P(ForwardSm89Fp8, KeepsTheContract) {
  Case c = GetParam();
  c.narrow_products = true;
  for (const std::uint64_t seed : schedules(c)) {
    emulator::set_seed(seed);
    check(c, {.device = emulated_ada(seed % 2 == 0 ? 89 : 120), .kernel = code_kernel});
    if (with_long_tail()) check(c, {.device = emulated_ada(90), .kernel = code_kernel});
  }
}

/// In the long tail all, and in float16, too.
std::vector<Case> cases_of_codes() {
  std::vector<Case> cases = narrow_query_cases(Dtype::bfloat16);
  if (with_long_tail()) {
    for (const Case& c : narrow_query_cases(Dtype::float16)) cases.push_back(c);
    return cases;
  }
  const std::set<std::string> same_way{"q8_tensor", "q8_window",    "q8_key_lengths", "q8_falling", "q8_gaps",
                                       "q8_alibi",  "q8_sink_used", "q8_no_keys",     "q8_e5m2"};
  std::erase_if(cases, [&](const Case& c) { return same_way.contains(c.name); });
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Cases, ForwardSm89Fp8, ::testing::ValuesIn(cases_of_codes()), case_name);

/// Tiles that can be asked for: with 16 and 32 rows a warp, one and several steps of 32 keys.
TEST(ForwardSm89Fp8Tiles, KeepTheContract) {
  std::vector<TileSize> tiles{{32, 32}, {128, 96}};
  if (with_long_tail()) tiles = {{32, 32}, {32, 128}, {64, 32}, {64, 64}, {64, 96}, {128, 32}, {128, 96}, {128, 128}};
  for (const TileSize& tile : tiles) {
    Case c = base("tiles", Dtype::bfloat16);
    Problem& p = c.problem;
    p.seq_q = 150, p.seq_kv = 211, p.batch = 1, p.head_dim = 128, p.causal = true;
    p.q_dtype = p.kv_dtype = Dtype::float8_e4m3, p.q_scales = p.kv_scales = ScaleKind::head;
    c.narrow_products = true;
    SCOPED_TRACE(std::to_string(tile.block_q) + " x " + std::to_string(tile.block_kv));
    check(c, {.device = emulated_ada(), .kernel = code_kernel, .tile = tile});
  }
}

using Codes = std::vector<std::uint8_t>;

/// One head of 128 columns; out as numbers.
std::vector<double> attend_codes(const Problem& p, const Codes& q, const Codes& k, const Codes& v) {
  std::vector<std::uint16_t> out(static_cast<std::size_t>(p.seq_q) * 128);
  forward(p, {.q = q.data(), .k = k.data(), .v = v.data(), .out = out.data()},
          {.device = emulated_ada(), .kernel = code_kernel});
  std::vector<double> numbers;
  for (const std::uint16_t x : out) numbers.push_back(from_bfloat16(x));
  return numbers;
}

/// The largest probability of a row is a power of two and is not rounded, wherever its key stands: a row that is nearly one
/// key is that key's value, which is a code.
TEST(ForwardSm89Fp8Accuracy, ARowThatIsOneKeyIsThatKey) {
  constexpr std::size_t queries = 70, keys = 200, dim = 128;
  Problem p{.seq_q = queries, .seq_kv = keys, .heads_q = 1, .heads_kv = 1, .head_dim = dim, .dtype = Dtype::bfloat16};
  p.q_dtype = p.kv_dtype = Dtype::float8_e4m3;
  for (const std::size_t outstanding : {0u, 63u, 64u, 131u, 199u}) {
    Codes q(queries * dim, 0x40), k(keys * dim, 0x08), v(keys * dim);  // of 2; of 2^-6: all scores but one are alike
    for (std::size_t d = 0; d < dim; ++d) k[outstanding * dim + d] = 0x38;  // 1: larger by 22
    for (std::size_t i = 0; i < v.size(); ++i) v[i] = static_cast<std::uint8_t>(i / dim == outstanding ? 1 + i % 0x7d : 0x28);
    const std::vector<double> out = attend_codes(p, q, k, v);
    for (std::size_t i = 0; i < out.size(); ++i) {
      const double want = from_code(Dtype::float8_e4m3, v[outstanding * dim + i % dim]);
      ASSERT_EQ(out[i], want) << "key " << outstanding << ", element " << i;
    }
  }
}

/// A long row's sum leaves the tensor core after each block. If 14 bits were kept of all of it, a row of equal keys would
/// be too small by far more than its rounding.
TEST(ForwardSm89Fp8Accuracy, LongSumsAreNotCut) {
  constexpr std::size_t keys = 6000, dim = 128;
  Problem p{.seq_q = 1, .seq_kv = keys, .heads_q = 1, .heads_kv = 1, .head_dim = dim, .dtype = Dtype::bfloat16};
  p.q_dtype = p.kv_dtype = Dtype::float8_e4m3;
  const Codes q(dim, 0), k(keys * dim, 0x38), v(keys * dim, 0x3d);  // scores are 0, values 1.625
  for (const double x : attend_codes(p, q, k, v)) ASSERT_EQ(x, 1.625);
}

TEST(ForwardSm89Fp8Choice, FollowsArchitectureAndOptions) {
  Problem p{.seq_q = 300, .seq_kv = 300, .head_dim = 128, .dtype = Dtype::bfloat16};
  p.q_dtype = p.kv_dtype = Dtype::float8_e4m3;
  EXPECT_EQ(make_plan(p, Pass::forward, typical_gpu(80)).kernel, "forward/portable");
  EXPECT_EQ(make_plan(p, Pass::forward, typical_gpu(86)).kernel, "forward/portable");
  EXPECT_EQ(make_plan(p, Pass::forward, typical_gpu(90)).kernel, "forward/sm90_fp8");
  for (const int arch : {89, 100, 103, 120, 121}) EXPECT_EQ(make_plan(p, Pass::forward, typical_gpu(arch)).kernel, code_kernel);
  const auto refuses = [&](auto change, const char* reason) {
    Problem other = p;
    change(other);
    const Plan plan = make_plan(other, Pass::forward, typical_gpu(89));
    for (const Candidate& candidate : plan.candidates) {
      if (candidate.kernel == code_kernel) return candidate.reason.find(reason) != std::string::npos;
    }
    return false;
  };
  EXPECT_TRUE(refuses([](Problem& o) { o.dtype = Dtype::float32; }, "16 bits"));
  EXPECT_TRUE(refuses([](Problem& o) { o.kv_scales = ScaleKind::token; }, "scales of rows"));
  EXPECT_TRUE(refuses([](Problem& o) { o.head_dim = 72; }, "multiples of 16"));
  EXPECT_TRUE(refuses([](Problem& o) { o.head_dim = 320; }, "up to 256"));
  EXPECT_TRUE(refuses([](Problem& o) { o.scale = -1; }, "positive scale"));
  EXPECT_TRUE(refuses([](Problem& o) { o.q_dtype.reset(); }, "queries of float8"));
}

}  // namespace
}  // namespace flash_attention::testing
