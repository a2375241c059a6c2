// forward/sm90 in the emulator: the whole contract, under several schedules.
#include <random>

#include "emulator/seed.h"
#include "flash_attention/attention.h"
#include "support/contract.h"

namespace flash_attention::testing {
namespace {

constexpr Device gpu{.kind = DeviceKind::emulator, .emulated_arch = 90};

class ForwardSm90 : public ::testing::TestWithParam<Case> {};

TEST_P(ForwardSm90, KeepsTheContract) {
  emulator::set_num_sms(3);  // so that a block takes several tiles, one after another
  for (const std::uint64_t seed : {1, 2}) {
    emulator::set_seed(seed);
    check(GetParam(), {.device = gpu, .kernel = "forward/sm90", .pass = Pass::forward});
  }
}

INSTANTIATE_TEST_SUITE_P(Float16, ForwardSm90, ::testing::ValuesIn(contract_cases(Dtype::float16)), case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, ForwardSm90, ::testing::ValuesIn(contract_cases(Dtype::bfloat16)), case_name);

/// Long enough for blocks to take tiles by the counter; the second time some of them are done again.
TEST(ForwardSm90Turns, KeepTheContract) {
  emulator::set_num_sms(3);
  emulator::set_seed(3);
  Case c;
  c.name = "turns";
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

constexpr std::int64_t length = 256, dim = 64;
const Problem square{
    .batch = 1, .seq_q = length, .seq_kv = length, .heads_q = 1, .heads_kv = 1, .head_dim = dim, .dtype = Dtype::bfloat16};

/// The tiles done again in a call whose keys grow by `growth` from the first to the last.
std::uint32_t count_repairs(float growth) {
  std::vector<std::uint16_t> q(length * dim), k(length * dim), v(length * dim), out(length * dim);
  std::mt19937 random(1);
  const auto bfloat16 = [](float x) { return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(x) >> 16); };
  for (std::int64_t i = 0; i < length * dim; ++i) {
    const auto position = static_cast<float>(i / dim) / length;
    q[i] = bfloat16(1.0f);
    k[i] = bfloat16(growth * position + 0.001f * static_cast<float>(random() % 100));
    v[i] = bfloat16(0.01f * static_cast<float>(random() % 100));
  }
  std::uint32_t repairs = 0;
  forward(square, {.q = q.data(), .k = k.data(), .v = v.data(), .out = out.data()},
          {.device = gpu, .repairs = &repairs, .kernel = "forward/sm90"});
  return repairs;
}

/// A score of 8 growth against the first block's: 2^40 is passed at 28.
TEST(ForwardSm90Repairs, AreCounted) {
  emulator::set_num_sms(3);
  const int block_q = make_plan(square, Pass::forward, device_info(gpu), "forward/sm90").block_q;
  EXPECT_EQ(count_repairs(0.5f), 0u);
  EXPECT_EQ(count_repairs(20.0f), (length + block_q - 1) / block_q);  // every row tile
}

}  // namespace
}  // namespace flash_attention::testing
