// forward/sm90 in the emulator: the whole contract, under several schedules.
#include <random>

#include "flash_attention/attention.h"
#include "kernels/emulated.h"
#include "support/cases/make_case.h"

namespace flash_attention::testing {
namespace {

constexpr Device gpu{.kind = DeviceKind::emulator, .emulated_arch = 90};

using ForwardSm90 = ::testing::TestWithParam<Case>;

TEST_P(ForwardSm90, KeepsTheContract) { check_sm90(GetParam(), "forward/sm90", Pass::forward, 3); }

INSTANTIATE_TEST_SUITE_P(Float16, ForwardSm90, ::testing::ValuesIn(some_of(contract_cases(Dtype::float16), 48)), case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, ForwardSm90,
                         ::testing::ValuesIn(telling_share_of(contract_cases(Dtype::bfloat16), 6, 2)), case_name);

TEST(ForwardSm90FarSequence, KeepsTheContract) {
  check(far_case(Dtype::bfloat16), {.device = gpu, .kernel = "forward/sm90", .pass = Pass::forward});
}

using ForwardSm90Loops = ::testing::TestWithParam<Case>;

TEST_P(ForwardSm90Loops, KeepTheContract) { check_sm90(GetParam(), "forward/sm90", Pass::forward, 2); }

/// One sequence, bfloat16 unless it says float16.
Case make_loop(const char* name, Problem p, std::vector<std::int32_t> key_lengths = {}) {
  p.batch = 1, p.key_lengths = !key_lengths.empty();
  if (p.dtype == Dtype::float32) p.dtype = Dtype::bfloat16;
  Case c;
  c.name = name, c.problem = p, c.key_lengths = std::move(key_lengths);
  return c;
}

/// Loops in which stages are used again, with ping-pong and without: blocks that only one
/// of them sees, rows past the end of the keys; and tiles without keys, one after another.
std::vector<Case> loops() {
  return {
      make_loop("pingpong", {.seq_q = 200, .seq_kv = 700, .heads_q = 1, .heads_kv = 1, .head_dim = 128, .causal = true},
                {650}),
      make_loop("no_pingpong", {.seq_q = 200, .seq_kv = 400, .heads_q = 1, .heads_kv = 1, .head_dim = 256, .causal = true},
                {390}),
      make_loop("window", {.seq_q = 330, .seq_kv = 330, .heads_q = 1, .heads_kv = 1, .head_dim = 128, .window_left = 30},
                {300}),
      make_loop("slopes_top_left", {.seq_q = 100,
                                    .seq_kv = 270,
                                    .heads_q = 2,
                                    .heads_kv = 1,
                                    .head_dim = 64,
                                    .alibi = true,
                                    .causal = true,
                                    .alignment = Alignment::top_left}),
      make_loop("empty_rows", {.seq_q = 900, .seq_kv = 70, .heads_q = 2, .heads_kv = 1, .head_dim = 64, .causal = true}),
  };
}

INSTANTIATE_TEST_SUITE_P(Bfloat16, ForwardSm90Loops, ::testing::ValuesIn(loops()), case_name);

/// Biases of 16 bits, which are loaded in pairs where their rows lie an even number of elements apart and all keys of a
/// block exist; the last block has fewer.
std::vector<Case> loops_with_bias() {
  std::vector<Case> cases = {
      make_loop("bias_64", {.seq_q = 200, .seq_kv = 270, .heads_q = 1, .heads_kv = 1, .head_dim = 64, .causal = true}),
      make_loop("bias_128", {.seq_q = 200, .seq_kv = 270, .heads_q = 2, .heads_kv = 1, .head_dim = 128}),
      make_loop("bias_256", {.seq_q = 150, .seq_kv = 130, .heads_q = 1, .heads_kv = 1, .head_dim = 256, .softcap = 2}),
      make_loop("bias_512", {.seq_q = 70, .seq_kv = 330, .heads_q = 1, .heads_kv = 1, .head_dim = 512}),
  };
  for (Case& c : cases) c.problem.bias = over(c.problem, false, true, true, Dtype::bfloat16);
  cases[1].infinite_bias = true;
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Bias, ForwardSm90Loops, ::testing::ValuesIn(loops_with_bias()), case_name);

/// Biases by TMA: rows that are a multiple of 16 bytes apart. Blocks that one warpgroup passes over, keys past the end,
/// rows without a finite bias.
std::vector<Case> loops_with_boxes() {
  std::vector<Case> cases = {
      make_loop("boxes_64", {.seq_q = 200, .seq_kv = 544, .heads_q = 2, .heads_kv = 1, .head_dim = 64, .causal = true},
                {530}),
      make_loop("boxes_128", {.seq_q = 150, .seq_kv = 400, .heads_q = 2, .heads_kv = 1, .head_dim = 128}),
      make_loop("boxes_192", {.seq_q = 140, .seq_kv = 280, .heads_q = 1, .heads_kv = 1, .head_dim = 192, .causal = true}),
      make_loop("boxes_256", {.seq_q = 150, .seq_kv = 200, .heads_q = 1, .heads_kv = 1, .head_dim = 256, .causal = true}),
      make_loop("boxes_float16", {.seq_q = 70, .seq_kv = 400, .heads_q = 2, .heads_kv = 2, .head_dim = 40}),
  };
  cases[4].problem.dtype = Dtype::float16;
  for (Case& c : cases) c.problem.bias = over(c.problem, false, true, true, c.problem.dtype);
  cases[1].infinite_bias = true;
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Boxes, ForwardSm90Loops, ::testing::ValuesIn(loops_with_boxes()), case_name);

using ForwardSm90Skips = ::testing::TestWithParam<Case>;

/// A warpgroup that passes over a block frees its slots: not before both copies into them have landed. Bulk copies land in
/// any order, so it takes several schedules, and many blocks, to have a V land first.
TEST_P(ForwardSm90Skips, KeepTheContract) {
  emulator::set_num_sms(16);
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    emulator::set_seed(seed);
    check(GetParam(), {.device = gpu, .kernel = "forward/sm90", .pass = Pass::forward});
  }
}

/// Small blocks of keys, of which each warpgroup sees some that the other does not, first ones and last ones.
std::vector<Case> skips() {
  const auto square = [](std::int64_t length, std::int64_t head_dim, std::int64_t head_dim_v) {
    return Problem{.seq_q = length,
                   .seq_kv = length,
                   .heads_q = 1,
                   .heads_kv = 1,
                   .head_dim = head_dim,
                   .head_dim_v = head_dim_v,
                   .causal = true};
  };
  Problem alibi = square(600, 256, 256);
  alibi.alibi = true;
  Problem softcap = square(520, 256, 256), window = square(520, 192, 256), narrow = square(1000, 128, 128);
  softcap.softcap = 50;
  softcap.window_left = 100, window.window_left = 30, narrow.window_left = 200;
  window.causal = false, window.window_right = 10, window.dtype = Dtype::float16;
  return {make_loop("alibi", alibi), make_loop("softcap", softcap), make_loop("window", window),
          make_loop("narrow_window", narrow)};
}

INSTANTIATE_TEST_SUITE_P(Sm90, ForwardSm90Skips, ::testing::ValuesIn(skips()), case_name);

/// A row all of whose scores are NaN is not one that sees nothing.
TEST(ForwardSm90Nan, ReachesRowsThatSeeNothingElse) {
  emulator::set_num_sms(2);
  emulator::set_seed(1);
  Case c = make_loop("nan_key", {.seq_q = 67, .seq_kv = 131, .heads_q = 2, .heads_kv = 2, .head_dim = 64});
  c.nan_key = 120, c.problem.window_left = c.problem.window_right = 0;
  check(c, {.device = gpu, .kernel = "forward/sm90", .pass = Pass::forward});
  c.name = "nan_query", c.nan_key = -1, c.nan_query = 40;
  check(c, {.device = gpu, .kernel = "forward/sm90", .pass = Pass::forward});
}

/// Long enough for blocks to take tiles by the counter; the second time some of them are done again.
TEST(ForwardSm90DynamicScheduler, KeepTheContract) {
  emulator::set_num_sms(3);
  emulator::set_seed(3);
  Case c;
  c.name = "dynamic_scheduler";
  c.problem = {.batch = 1,
               .seq_q = 1100,
               .seq_kv = 1100,
               .heads_q = 2,
               .heads_kv = 1,
               .head_dim = 64,
               .dtype = Dtype::bfloat16,
               .causal = true};
  for (const Draw draw : {Draw::normal, Draw::growing}) {
    c.draw = draw;
    check(c, {.device = gpu, .kernel = "forward/sm90", .pass = Pass::forward});
  }
}

/// Blocks inside of the edges: soft caps at which one polynomial, the other and none will do; the left edge of a window;
/// dropout under products.
TEST(ForwardSm90Interior, KeepsTheContract) {
  emulator::set_num_sms(3);
  emulator::set_seed(4);
  Case c;
  c.problem = {
      .batch = 1, .seq_q = 130, .seq_kv = 520, .heads_q = 1, .heads_kv = 1, .head_dim = 64, .dtype = Dtype::bfloat16};
  for (const float softcap : {40.0f, 10.0f, 2.0f}) {
    c.name = "softcap";
    c.problem.softcap = softcap;
    c.problem.alibi = softcap == 10.0f;
    check(c, {.device = gpu, .kernel = "forward/sm90", .pass = Pass::forward});
  }
  c.problem.softcap = 0;
  c.problem.window_left = 300;
  for (const bool alibi : {false, true}) {
    c.name = "window";
    c.problem.alibi = alibi;
    check(c, {.device = gpu, .kernel = "forward/sm90", .pass = Pass::forward});
  }
  c.problem.alibi = false;
  c.problem.window_left = -1;
  c.problem.dropout_p = 0.3f;
  c.name = "dropout";
  check(c, {.device = gpu, .kernel = "forward/sm90", .pass = Pass::forward});
}

constexpr std::int64_t length = 256;
const Problem square{
    .batch = 1, .seq_q = length, .seq_kv = length, .heads_q = 1, .heads_kv = 1, .head_dim = 64, .dtype = Dtype::bfloat16};

/// The tiles done again in a call whose keys grow by `growth` from the first to the last. Those past `keys` are NaN.
std::uint32_t count_repairs(Problem problem, float growth, std::int32_t keys = length, float slope = 0) {
  const std::int64_t dim = problem.head_dim;
  std::vector<std::uint16_t> q(length * dim), k(length * dim), v(length * dim), out(length * dim);
  std::mt19937 random(1);
  const auto bfloat16 = [](float x) { return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(x) >> 16); };
  for (std::int64_t i = 0; i < length * dim; ++i) {
    const auto position = static_cast<float>(i / dim) / length;
    q[i] = bfloat16(1.0f);
    k[i] = bfloat16(growth * position + 0.001f * static_cast<float>(random() % 100));
    v[i] = bfloat16(0.01f * static_cast<float>(random() % 100));
    if (i / dim >= keys) k[i] = v[i] = 0x7fff;
  }
  problem.key_lengths = keys < length;
  std::uint32_t repairs = 0;
  forward(problem,
          {.q = q.data(),
           .k = k.data(),
           .v = v.data(),
           .out = out.data(),
           .alibi_slopes = problem.alibi ? &slope : nullptr,
           .key_lengths = keys < length ? &keys : nullptr},
          {.device = gpu, .repairs = &repairs, .kernel = "forward/sm90"});
  return repairs;
}

/// TMA takes no address that is not a multiple of 16: the warps copy such biases by themselves.
TEST(ForwardSm90Boxes, AreTheSameAtAnyAddress) {
  emulator::set_num_sms(3);
  for (const std::int64_t head_dim : {64, 256}) {
    Problem problem = square;
    problem.head_dim = head_dim, problem.seq_q = 130;
    problem.bias = {.present = true, .dtype = Dtype::bfloat16, .q_stride = length};
    const std::int64_t rows = problem.seq_q * head_dim, keys = length * head_dim;
    std::vector<std::uint16_t> q(rows), k(keys), v(keys), out(rows), out_of_odd(rows);
    std::vector<std::uint16_t> bias(problem.seq_q * length + 8);
    std::mt19937 random(2);
    const auto fill = [&](std::vector<std::uint16_t>& all) {
      for (std::uint16_t& x : all) x = static_cast<std::uint16_t>(0x3f00 + random() % 256 + random() % 2 * 0x8000);
    };
    fill(q), fill(k), fill(v), fill(bias);
    std::uint16_t* first = bias.data();
    while (reinterpret_cast<std::uintptr_t>(first) % 16 != 0) ++first;
    const std::vector<std::uint16_t> values(first, first + problem.seq_q * length);
    const auto run = [&](const std::uint16_t* at, std::vector<std::uint16_t>& to) {
      forward(problem, {.q = q.data(), .k = k.data(), .v = v.data(), .out = to.data(), .bias = at},
              {.device = gpu, .kernel = "forward/sm90"});
    };
    run(first, out);
    std::vector<std::uint16_t> odd(values.size() + 9);
    std::uint16_t* second = odd.data();
    while (reinterpret_cast<std::uintptr_t>(second) % 16 != 2) ++second;
    std::copy(values.begin(), values.end(), second);
    run(second, out_of_odd);
    EXPECT_EQ(out, out_of_odd) << "head_dim " << head_dim;
  }
}

/// Biases of -1e30 leave nothing of the scores beside them: all keys weigh the same. A product of the maximum with log2 e
/// would be rounded by more than any exponent.
TEST(ForwardSm90Boxes, MayBeHuge) {
  emulator::set_num_sms(3);
  Problem problem = square;
  problem.seq_q = 70, problem.bias = {.present = true, .dtype = Dtype::bfloat16, .q_stride = length};
  const std::int64_t dim = problem.head_dim, rows = problem.seq_q;
  const std::vector<std::uint16_t> q(rows * dim, 0x3f80), bias(rows * length, 0xf149);
  std::vector<std::uint16_t> k(length * dim), v(length * dim), out(rows * dim);
  for (std::int64_t i = 0; i < length * dim; ++i)
    k[i] = i / dim % 2 == 0 ? 0x3f80 : 0xbf80, v[i] = i / dim < 64 ? 0x4080 : 0;
  forward(problem, {.q = q.data(), .k = k.data(), .v = v.data(), .out = out.data(), .bias = bias.data()},
          {.device = gpu, .kernel = "forward/sm90"});
  EXPECT_EQ(out, std::vector<std::uint16_t>(rows * dim, 0x3f80));  // 64 of 256 values are 4
}

/// A score of 8 growth against the first block's: 2^40 is passed at 28.
TEST(ForwardSm90Repairs, AreCounted) {
  emulator::set_num_sms(3);
  const int block_q = make_plan(square, Pass::forward, device_info(gpu), "forward/sm90").block_q;
  EXPECT_EQ(count_repairs(square, 0.5f), 0u);
  EXPECT_EQ(count_repairs(square, 20.0f), (length + block_q - 1) / block_q);  // every row tile
}

/// ALiBi without a right edge: the first block lies far behind the diagonal, and the keys near it outgrow it. Such tiles
/// begin with the maximum that is raised with every block, the others stay with the fixed one.
TEST(ForwardSm90Repairs, SlopesNeedNone) {
  emulator::set_num_sms(3);
  Problem problem = square;
  problem.alibi = true;
  for (const std::int64_t head_dim : {64, 256}) {
    problem.head_dim = head_dim;
    for (const float slope : {0.01f, 0.4f, 1.0f}) {
      EXPECT_EQ(count_repairs(problem, 0.5f, length, slope), 0u) << "head_dim " << head_dim << ", slope " << slope;
    }
  }
}

/// A repair would make the result right all the same.
TEST(ForwardSm90Repairs, RowsPastTheEndNeedNone) {
  emulator::set_num_sms(3);
  for (const std::int64_t head_dim : {64, 256}) {
    Problem problem = square;
    problem.head_dim = head_dim;
    for (const std::int64_t window_left : {-1, 200}) {
      problem.window_left = window_left;
      EXPECT_EQ(count_repairs(problem, 0.5f, 200), 0u) << "head_dim " << head_dim << ", window_left " << window_left;
    }
  }
}

}  // namespace
}  // namespace flash_attention::testing
