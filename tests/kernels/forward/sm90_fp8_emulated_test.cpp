// forward/sm90_fp8 in the emulator: Q, K and V in 8 bits.
#include <set>

#include "kernels/emulated.h"
#include "support/oracle/narrow.h"
#include "support/oracle/rounding.h"

namespace flash_attention::testing {
namespace {

constexpr Device hopper_for_fp8{.kind = DeviceKind::emulator, .emulated_arch = 90};
constexpr const char* fp8_kernel = "forward/sm90_fp8";

class ForwardSm90Fp8 : public ::testing::TestWithParam<Case> {
  void TearDown() override { emulator::set_num_sms(0); }
};

TEST_P(ForwardSm90Fp8, KeepsTheContract) {
  emulator::set_num_sms(2);  // so that a block takes several tiles, one after another
  emulator::set_seed(std::hash<std::string>{}(GetParam().name));
  Case c = GetParam();
  c.narrow_products = true;
  check(c, {.device = hopper_for_fp8, .kernel = fp8_kernel});
}

/// Those that take a way of their own through the kernel; in the long tail all, and in float16, too.
std::vector<Case> telling_cases() {
  std::vector<Case> cases = narrow_query_cases(Dtype::bfloat16);
  if (with_long_tail()) {
    for (const Case& c : narrow_query_cases(Dtype::float16)) cases.push_back(c);
    return cases;
  }
  const std::set<std::string> telling{"q8_plain",  "q8_head",  "q8_window", "q8_softcap",         "q8_packed", "q8_growing",
                                      "q8_nan",    "q8_wide",  "q8_alibi",  "q8_alibi_both_ways", "q8_sink",   "q8_sink_used",
                                      "q8_bias", "q8_bias_boxes", "q8_bias_cap", "q8_pages_16", "q8_pages_packed", "q8_late_heads"};
  std::erase_if(cases, [&](const Case& c) { return !telling.contains(c.name); });
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Cases, ForwardSm90Fp8, ::testing::ValuesIn(telling_cases()), case_name);

using Codes = std::vector<std::uint8_t>;

std::vector<std::uint16_t> attend(const Problem& p, const Codes& q, const Codes& k, const Codes& v) {
  std::vector<std::uint16_t> out(q.size());
  Options options{.device = hopper_for_fp8, .kernel = fp8_kernel};
  std::vector<std::byte> workspace(workspace_bytes(p, Pass::forward, options) + 256);
  options.workspace = reinterpret_cast<void*>((reinterpret_cast<std::uintptr_t>(workspace.data()) + 255) / 256 * 256);
  options.workspace_bytes = workspace.size() - 256;
  forward(p, {.q = q.data(), .k = k.data(), .v = v.data(), .out = out.data()}, options);
  return out;
}

/// A probability of 1 is not rounded: with one key a row is its value, which is a code.
TEST(ForwardSm90Fp8Accuracy, ARowOfOneKeyIsThatKey) {
  Problem p{.seq_q = 70, .seq_kv = 1, .heads_q = 1, .heads_kv = 1, .head_dim = 128, .dtype = Dtype::bfloat16};
  p.q_dtype = p.kv_dtype = Dtype::float8_e4m3;
  std::vector<std::uint8_t> q(70 * 128), k(128), v(128);
  for (std::size_t i = 0; i < q.size(); ++i) q[i] = static_cast<std::uint8_t>(0x30 + i % 13 + (i % 2) * 0x80);
  for (std::size_t i = 0; i < k.size(); ++i)
    k[i] = static_cast<std::uint8_t>(0x28 + i % 11), v[i] = static_cast<std::uint8_t>(i % 0x7f);
  const std::vector<std::uint16_t> out = attend(p, q, k, v);
  for (std::size_t i = 0; i < out.size(); ++i) {
    const double got = from_bfloat16(out[i]), want = from_code(Dtype::float8_e4m3, v[i % 128]);
    ASSERT_EQ(got, want) << "element " << i;
  }
}

/// A NaN in V that others see makes a row be computed again, with dot products in fp32. lse is that of the tensor core,
/// which keeps 14 bits of sums whose terms cancel: the row is normalised by what it is computed from.
TEST(ForwardSm90Fp8Accuracy, ARepairedRowOfOneKeyIsThatKey) {
  constexpr std::size_t keys = 70, dim = 128;
  Problem p{.seq_q = keys, .seq_kv = keys, .heads_q = 1, .heads_kv = 1, .head_dim = dim, .dtype = Dtype::bfloat16};
  p.q_dtype = p.kv_dtype = Dtype::float8_e4m3, p.window_left = 0, p.causal = true;
  std::vector<std::uint8_t> q(keys * dim), k(q.size()), v(q.size());
  for (std::size_t i = 0; i < q.size(); ++i) {
    q[i] = static_cast<std::uint8_t>(i % 2 == 0 ? 0x7e + i / 2 % 2 * 0x80 : 0x40 + i % 7);  // 448, small, -448, small
    k[i] = static_cast<std::uint8_t>(i % 2 == 0 ? 0x7e : 0x40);
    v[i] = static_cast<std::uint8_t>(i / dim == 5 ? 0x7f : 0x20 + i % 0x41);
  }
  const std::vector<std::uint16_t> out = attend(p, q, k, v);
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (i / dim == 5) continue;
    ASSERT_EQ(from_bfloat16(out[i]), from_code(Dtype::float8_e4m3, v[i])) << "element " << i;
  }
}

TEST(ForwardSm90Fp8Choice, IsThePlannersOnHopperAlone) {
  Problem p{.seq_q = 300, .seq_kv = 300, .head_dim = 128, .dtype = Dtype::bfloat16};
  p.q_dtype = p.kv_dtype = Dtype::float8_e4m3;
  EXPECT_EQ(make_plan(p, Pass::forward, typical_gpu(90)).kernel, fp8_kernel);
  EXPECT_EQ(make_plan(p, Pass::forward, typical_gpu(89)).kernel, "forward/sm89_fp8");
  const auto chosen_with = [&](auto change) {
    Problem other = p;
    change(other);
    return make_plan(other, Pass::forward, typical_gpu(90)).kernel;
  };
  EXPECT_EQ(chosen_with([](Problem& o) { o.sink = o.alibi = true; }), fp8_kernel);
  EXPECT_EQ(chosen_with([](Problem& o) { o.bias = {.present = true, .dtype = Dtype::bfloat16, .q_stride = 304}; }), fp8_kernel);
  const auto in_pages_of = [](std::int64_t rows, std::int64_t pages) {
    return [=](Problem& o) {
      o.page_size = rows, o.num_pages = pages, o.page_table_stride = pages, o.seqused_kv = true, o.seq_kv = rows * pages;
    };
  };
  EXPECT_EQ(chosen_with(in_pages_of(16, 20)), fp8_kernel);
  EXPECT_EQ(chosen_with(in_pages_of(7, 20)), "forward/sm89_fp8");
  EXPECT_EQ(chosen_with(in_pages_of(64, 1 << 18)), "forward/sm89_fp8");  // V^T would take more than 1 GiB
  EXPECT_EQ(chosen_with([](Problem& o) { o.dropout_p = 0.1f; }), "forward/sm89_fp8");
  EXPECT_EQ(chosen_with([](Problem& o) { o.dtype = Dtype::float32; }), "forward/portable");
  EXPECT_EQ(chosen_with([](Problem& o) { o.kv_scales = ScaleKind::token; }), "forward/portable");
}

}  // namespace
}  // namespace flash_attention::testing
