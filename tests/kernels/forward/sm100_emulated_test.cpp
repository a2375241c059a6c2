// forward/sm100 in the emulator: the contract, and loops in which stages, phases and tensor memory are used again.
#include "flash_attention/attention.h"
#include "kernels/emulated.h"
#include "support/cases/make_case.h"

namespace flash_attention::testing {
namespace {

constexpr Device sm100_device{.kind = DeviceKind::emulator, .emulated_arch = 100};
const Target sm100_target{.device = sm100_device, .kernel = "forward/sm100", .pass = Pass::forward};

/// On so few SMs that a block takes several tiles. What the kernel does not take, it refuses by name.
void check_sm100(const Case& c, int num_sms) {
  if (const std::string reason = rejection(c, sm100_target); !reason.empty()) {
    EXPECT_TRUE(reason.find("takes") != std::string::npos || reason.find("comput") != std::string::npos ||
                reason.find("head_dim") != std::string::npos || reason.find("head dimension") != std::string::npos ||
                reason.find("bits") != std::string::npos || reason.find("TMA needs") != std::string::npos ||
                reason.find("nothing to load") != std::string::npos || reason.find("positive") != std::string::npos)
        << reason;
    return;
  }
  emulator::set_num_sms(num_sms);
  for (const std::uint64_t seed : schedules(c)) {
    emulator::set_seed(seed);
    check(c, sm100_target);
  }
}

using ForwardSm100 = ::testing::TestWithParam<Case>;

TEST_P(ForwardSm100, KeepsTheContract) { check_sm100(GetParam(), 3); }

INSTANTIATE_TEST_SUITE_P(Float16, ForwardSm100, ::testing::ValuesIn(some_of(contract_cases(Dtype::float16), 48)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, ForwardSm100,
                         ::testing::ValuesIn(telling_share_of(contract_cases(Dtype::bfloat16), 6, 4)), case_name);

using ForwardSm100Loops = ::testing::TestWithParam<Case>;

TEST_P(ForwardSm100Loops, KeepTheContract) { check_sm100(GetParam(), 2); }

/// One sequence, bfloat16 unless it says float16.
Case make_sm100_loop(const char* name, Problem p, std::vector<std::int32_t> key_lengths = {}) {
  p.batch = 1, p.key_lengths = !key_lengths.empty();
  if (p.dtype == Dtype::float32) p.dtype = Dtype::bfloat16;
  Case c;
  c.name = name, c.problem = p, c.key_lengths = std::move(key_lengths);
  return c;
}

/// Stages that are used again; blocks that only one Q tile sees, or neither; rows past the end; tiles without keys.
std::vector<Case> sm100_loops() {
  return {
      make_sm100_loop("full_128", {.seq_q = 300, .seq_kv = 701, .heads_q = 2, .heads_kv = 1, .head_dim = 128}),
      make_sm100_loop("causal_128",
                      {.seq_q = 577, .seq_kv = 577, .heads_q = 1, .heads_kv = 1, .head_dim = 128, .causal = true}, {550}),
      make_sm100_loop("one_tile_64", {.seq_q = 100, .seq_kv = 650, .heads_q = 3, .heads_kv = 1, .head_dim = 64}),
      make_sm100_loop("causal_192_128", {.seq_q = 260,
                                         .seq_kv = 400,
                                         .heads_q = 1,
                                         .heads_kv = 1,
                                         .head_dim = 192,
                                         .head_dim_v = 128,
                                         .dtype = Dtype::float16,
                                         .causal = true}),
      make_sm100_loop("window_80",
                      {.seq_q = 530, .seq_kv = 530, .heads_q = 1, .heads_kv = 1, .head_dim = 80, .window_left = 30}, {500}),
      make_sm100_loop(
          "soft_cap_40",
          {.seq_q = 257, .seq_kv = 270, .heads_q = 1, .heads_kv = 1, .head_dim = 40, .softcap = 3, .causal = true}),
      make_sm100_loop("slopes_top_left", {.seq_q = 200,
                                          .seq_kv = 270,
                                          .heads_q = 2,
                                          .heads_kv = 1,
                                          .head_dim = 64,
                                          .alibi = true,
                                          .causal = true,
                                          .alignment = Alignment::top_left}),
      make_sm100_loop("empty_rows",
                      {.seq_q = 900, .seq_kv = 70, .heads_q = 2, .heads_kv = 1, .head_dim = 64, .causal = true}),
  };
}

INSTANTIATE_TEST_SUITE_P(Bfloat16, ForwardSm100Loops, ::testing::ValuesIn(sm100_loops()), case_name);

/// Scores that change in tensor memory, a part of a row at a time: a bias, and blocks of documents, some of them hidden.
std::vector<Case> sm100_loops_by_parts() {
  Case bias =
      make_sm100_loop("bias", {.seq_q = 200, .seq_kv = 300, .heads_q = 2, .heads_kv = 1, .head_dim = 64, .causal = true});
  bias.problem.bias = over(bias.problem, false, true, true, Dtype::bfloat16);
  bias.infinite_bias = true;
  return {bias, documents_case("documents", 520, 190, 4, [](Case&, Problem& p) { p.heads_q = p.heads_kv = 1; })};
}

INSTANTIATE_TEST_SUITE_P(Parts, ForwardSm100Loops, ::testing::ValuesIn(sm100_loops_by_parts()), case_name);

/// Maxima that rise with every block: O is rescaled each time.
TEST(ForwardSm100, RescalesForLateMaxima) {
  Case c = make_sm100_loop("late_maxima", {.seq_q = 300, .seq_kv = 500, .heads_q = 1, .heads_kv = 1, .head_dim = 64});
  c.problem.scale = 3;
  check_sm100(c, 1);
}

/// Why the kernel cannot take a problem.
std::string refusal_of_sm100(void (*change)(Problem&)) {
  Problem p{.seq_q = 256, .seq_kv = 256, .heads_q = 1, .heads_kv = 1, .head_dim = 64, .dtype = Dtype::bfloat16};
  change(p);
  try {
    make_plan(p, Pass::forward, typical_gpu(100), "forward/sm100");
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

TEST(ForwardSm100, RefusesByName) {
  const std::pair<const char*, void (*)(Problem&)> refusals[] = {
      {"not float32", [](Problem& p) { p.dtype = Dtype::float32; }},
      {"multiples of 8", [](Problem& p) { p.head_dim = 60; }},
      {"a head_dim up to 192", [](Problem& p) { p.head_dim = 256; }},
      {"a head_dim_v up to 128", [](Problem& p) { p.head_dim_v = 192; }},
      {"takes no dropout", [](Problem& p) { p.dropout_p = 0.5f; }},
      {"takes no pages", [](Problem& p) { p.page_size = 16, p.num_pages = 16, p.seqused_kv = true; }},
      {"scale must be positive", [](Problem& p) { p.scale = -1.0f; }},
      {"nothing to load", [](Problem& p) { p.seq_kv = 0; }},
      {"computes no statistics", [](Problem& p) { p.return_entropy = true; }},
      {"depend on the call", [](Problem& p) { p.invariant = true; }},
  };
  for (const auto& [words, change] : refusals) {
    const std::string reason = refusal_of_sm100(change);
    EXPECT_NE(reason.find(words), std::string::npos) << words << ": '" << reason << "'";
  }
}

TEST(ForwardSm100, IsChosenWhereTensorMemoryIs) {
  const Problem problem{.seq_q = 256, .seq_kv = 256, .heads_q = 1, .heads_kv = 1, .head_dim = 64, .dtype = Dtype::bfloat16};
  for (const int arch : {100, 103}) EXPECT_EQ(make_plan(problem, Pass::forward, typical_gpu(arch)).kernel, "forward/sm100");
  for (const int arch : {90, 120})
    EXPECT_THROW(make_plan(problem, Pass::forward, typical_gpu(arch), "forward/sm100"), Error);
}

}  // namespace
}  // namespace flash_attention::testing
