// Biases of backward/sm90 by TMA, in the emulator.
#include <random>

#include "flash_attention/attention.h"
#include "kernels/emulated.h"

namespace flash_attention::testing {
namespace {

constexpr Device emulated_sm90{.kind = DeviceKind::emulator, .emulated_arch = 90};

using BackwardSm90Boxes = ::testing::TestWithParam<Case>;

TEST_P(BackwardSm90Boxes, KeepTheContract) { check_sm90(GetParam(), "backward/sm90", Pass::backward, 2); }

/// Rows that are a multiple of 16 bytes apart: queries and keys past the end, steps that one warpgroup skips, biases that
/// heads or sequences share, biases of -inf, dQ by a separate loop. Also other rows, whose biases threads load.
std::vector<Case> boxes() {
  std::vector<Case> cases;
  const auto add = [&](const char* name, Problem p, bool batch = false, bool heads = true) -> Case& {
    p.dtype = p.head_dim == 40 ? Dtype::float16 : Dtype::bfloat16;
    p.bias = over(p, batch, heads, true, p.dtype);
    Case c;
    c.name = name, c.problem = p, c.dbias = true;
    cases.push_back(c);
    return cases.back();
  };
  add("causal", {.batch = 1, .seq_q = 270, .seq_kv = 264, .heads_q = 2, .heads_kv = 1, .head_dim = 64, .causal = true});
  add("full", {.batch = 2, .seq_q = 210, .seq_kv = 400, .heads_q = 2, .heads_kv = 2, .head_dim = 64}, true).infinite_bias =
      true;
  add("of_all_heads", {.batch = 2, .seq_q = 130, .seq_kv = 136, .heads_q = 2, .heads_kv = 2, .head_dim = 64}, true, false);
  add("float16_40", {.batch = 1, .seq_q = 70, .seq_kv = 392, .heads_q = 2, .heads_kv = 2, .head_dim = 40});
  add("deterministic",
      {.batch = 1, .seq_q = 70, .seq_kv = 264, .heads_q = 1, .heads_kv = 1, .head_dim = 64, .deterministic = true});
  add("not_aligned", {.batch = 1, .seq_q = 150, .seq_kv = 203, .heads_q = 2, .heads_kv = 1, .head_dim = 64});
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Loops, BackwardSm90Boxes, ::testing::ValuesIn(boxes()), case_name);

/// TMA takes no address that is not a multiple of 16: threads load such biases by themselves.
TEST(BackwardSm90Bias, IsTheSameAtAnyAddress) {
  emulator::set_num_sms(2);
  constexpr std::int64_t length = 200, dim = 64;
  Problem problem{.batch = 1, .seq_q = length, .seq_kv = length, .heads_q = 1, .heads_kv = 1, .head_dim = dim};
  problem.dtype = Dtype::bfloat16;
  problem.bias = {.present = true, .dtype = Dtype::bfloat16, .q_stride = length};
  std::vector<std::uint16_t> q(length * dim), k(q), v(q), dout(q), out(q), bias(length * length + 16);
  std::mt19937 random(2);
  for (auto* all : {&q, &k, &v, &dout, &bias}) {
    for (std::uint16_t& x : *all) x = static_cast<std::uint16_t>(0x3f00 + random() % 128 + random() % 2 * 0x8000);
  }
  const std::vector<std::uint16_t> values(bias.begin(), bias.begin() + length * length);
  std::vector<float> lse(length);
  const auto gradients = [&](std::uintptr_t offset) {  // of k and v: each has one sum in one order
    std::uint16_t* at = bias.data();
    while (reinterpret_cast<std::uintptr_t>(at) % 16 != offset) ++at;
    std::copy(values.begin(), values.end(), at);
    Buffers buffers{.q = q.data(), .k = k.data(), .v = v.data(), .out = out.data(), .bias = at};
    buffers.lse = lse.data();
    forward(problem, buffers, {.device = emulated_sm90});
    std::vector<std::uint16_t> dq(q), dk(q), dv(q);
    buffers.dout = dout.data(), buffers.dq = dq.data(), buffers.dk = dk.data(), buffers.dv = dv.data();
    Options options{.device = emulated_sm90, .kernel = "backward/sm90"};
    options.workspace_bytes = workspace_bytes(problem, Pass::backward, options);
    std::vector<std::byte> workspace(options.workspace_bytes + 256);
    options.workspace = workspace.data() + (256 - reinterpret_cast<std::uintptr_t>(workspace.data()) % 256);
    backward(problem, buffers, options);
    dk.insert(dk.end(), dv.begin(), dv.end());
    return dk;
  };
  EXPECT_EQ(gradients(0), gradients(2));
}

}  // namespace
}  // namespace flash_attention::testing
