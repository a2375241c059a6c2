// backward/sm90 in the emulator: the whole contract, under several schedules, with sums in memory and without.
#include "kernels/emulated.h"
#include "support/cases/make_case.h"

namespace flash_attention::testing {
namespace {

const Target target{
    .device = {.kind = DeviceKind::emulator, .emulated_arch = 90}, .kernel = "backward/sm90", .pass = Pass::backward};

using BackwardSm90 = ::testing::TestWithParam<Case>;

TEST_P(BackwardSm90, KeepsTheContract) { check_sm90(GetParam(), "backward/sm90", Pass::backward, 3); }

using BackwardSm90Deterministic = ::testing::TestWithParam<Case>;

TEST_P(BackwardSm90Deterministic, KeepsTheContract) {
  Case c = GetParam();
  c.problem.deterministic = true;
  check_sm90(c, "backward/sm90", Pass::backward, 3);
}

using BackwardSm90Wide = ::testing::TestWithParam<Case>;

TEST_P(BackwardSm90Wide, KeepsTheContract) {
  Case c = GetParam();
  c.problem.head_dim = 136;
  emulator::set_num_sms(3);
  emulator::set_seed(4);
  check(c, target);
}

using BackwardSm90Loops = ::testing::TestWithParam<Case>;

TEST_P(BackwardSm90Loops, KeepTheContract) { check_sm90(GetParam(), "backward/sm90", Pass::backward, 2); }

class BackwardSm90Turns : public ::testing::TestWithParam<Case> {};

TEST_P(BackwardSm90Turns, KeepTheContractAndTheirBits) {
  emulator::set_num_sms(2);
  emulator::set_seed(1);
  check(GetParam(), target);
  check_reproducible(GetParam(), target, [](int run) { emulator::set_seed(static_cast<std::uint64_t>(3 + run)); });
}

Case loop(const char* name, Problem p) {
  p.batch = 1, p.dtype = Dtype::bfloat16;
  Case c;
  c.name = name, c.problem = p;
  return c;
}

/// Loops on which every ring of slots comes round several times, in blocks that take several tasks; and tasks without
/// steps, which a block takes faster than it works on them.
std::vector<Case> long_loops() {
  Case bad_key =
      loop("bad_key", {.seq_q = 290, .seq_kv = 300, .heads_q = 2, .heads_kv = 2, .head_dim = 64, .causal = true});
  bad_key.nan_key = 240;  // in tiles that are cleaned, in a part that the second warpgroup cleans
  return {
      bad_key,
      loop("head_dim_256", {.seq_q = 330, .seq_kv = 460, .heads_q = 2, .heads_kv = 1, .head_dim = 256, .causal = true}),
      loop("head_dim_192_128",
           {.seq_q = 400, .seq_kv = 330, .heads_q = 1, .heads_kv = 1, .head_dim = 192, .head_dim_v = 128}),
      loop("head_dim_128", {.seq_q = 150, .seq_kv = 900, .heads_q = 2, .heads_kv = 2, .head_dim = 128}),
      loop("unseen_keys",
           {.seq_q = 70, .seq_kv = 900, .heads_q = 1, .heads_kv = 1, .head_dim = 136, .causal = true, .window_left = 9}),
      // The second warpgroup of dQ has no query and passes over a tile of which no key is hidden, in one task after
      // another.
      loop("one_query",
           {.seq_q = 1, .seq_kv = 896, .heads_q = 15, .heads_kv = 3, .head_dim = 136, .causal = true, .window_left = 831}),
      loop("empty_rows", {.seq_q = 900, .seq_kv = 70, .heads_q = 1, .heads_kv = 1, .head_dim = 136, .causal = true}),
      // The second warpgroup has no key: it passes over every step, and nothing holds its warps together.
      loop("half_a_block", {.seq_q = 1900, .seq_kv = 20, .heads_q = 2, .heads_kv = 2, .head_dim = 72, .softcap = 20}),
      loop("head_dim_64", {.seq_q = 280, .seq_kv = 900, .heads_q = 1, .heads_kv = 1, .head_dim = 64, .causal = true}),
  };
}

/// The same with dQ summed in memory: loops of an even and an odd number of steps and of one, warpgroups that see nothing
/// of a tile, tasks without steps.
std::vector<Case> summing_loops() {
  Case packed = loop("sums_128_packed", {.seq_q = 200, .seq_kv = 260, .heads_q = 4, .heads_kv = 1, .head_dim = 128});
  packed.problem.packed = packed.problem.causal = true;
  packed.problem.batch = 3, packed.problem.total_q = 271, packed.problem.total_kv = 400;
  packed.cu_seqlens_q = {0, 200, 201, 271}, packed.cu_seqlens_kv = {0, 260, 330, 400};
  return {
      packed,
      loop("sums_64", {.seq_q = 330, .seq_kv = 800, .heads_q = 2, .heads_kv = 1, .head_dim = 64, .causal = true}),
      loop("sums_64_empty_rows",
           {.seq_q = 400, .seq_kv = 250, .heads_q = 1, .heads_kv = 1, .head_dim = 64, .causal = true}),
      loop("sums_128", {.seq_q = 330, .seq_kv = 520, .heads_q = 2, .heads_kv = 1, .head_dim = 128, .causal = true}),
      // The warpgroups own different numbers of steps, in tasks of a block one after another.
      loop("sums_72_odd", {.seq_q = 190, .seq_kv = 600, .heads_q = 1, .heads_kv = 1, .head_dim = 72, .causal = true}),
      loop("sums_64_128", {.seq_q = 150, .seq_kv = 300, .heads_q = 2, .heads_kv = 2, .head_dim = 64, .head_dim_v = 128}),
      loop("sums_24_64", {.seq_q = 70, .seq_kv = 400, .heads_q = 2, .heads_kv = 2, .head_dim = 24, .head_dim_v = 64}),
      loop("sums_128_one_step", {.seq_q = 60, .seq_kv = 500, .heads_q = 1, .heads_kv = 1, .head_dim = 128}),
      // Few queries: neighbouring tasks are of different heads.
      loop("sums_128_interleaved_heads", {.seq_q = 100, .seq_kv = 520, .heads_q = 3, .heads_kv = 3, .head_dim = 128}),
      loop("sums_64_interleaved_heads", {.seq_q = 70, .seq_kv = 500, .heads_q = 4, .heads_kv = 2, .head_dim = 64}),
      // The heads of a group in six and in three tasks, dK and dV summed in memory (tests/plan/sm90_backward_test.cpp).
      loop("sums_64_gqa_split", {.seq_q = 200, .seq_kv = 300, .heads_q = 6, .heads_kv = 1, .head_dim = 64, .causal = true}),
      loop("sums_40_24_gqa_split",
           {.seq_q = 150, .seq_kv = 450, .heads_q = 3, .heads_kv = 1, .head_dim = 40, .head_dim_v = 24}),
      loop("sums_128_gqa_split",
           {.seq_q = 200, .seq_kv = 300, .heads_q = 6, .heads_kv = 1, .head_dim = 128, .causal = true}),
      loop("sums_96_80_gqa_split",
           {.seq_q = 130, .seq_kv = 330, .heads_q = 3, .heads_kv = 1, .head_dim = 96, .head_dim_v = 80}),
      // The first heads are converted while the others are computed (tests/plan/sm90_backward_test.cpp).
      loop("sums_64_early", {.seq_q = 120, .seq_kv = 300, .heads_q = 19, .heads_kv = 19, .head_dim = 64, .causal = true}),
      loop("sums_96_early", {.seq_q = 150, .seq_kv = 290, .heads_q = 15, .heads_kv = 15, .head_dim = 96, .causal = true}),
      loop("sums_128_unseen",
           {.seq_q = 70, .seq_kv = 700, .heads_q = 1, .heads_kv = 1, .head_dim = 128, .causal = true, .window_left = 9}),
  };
}

/// Options of the same loops: alone at head_dim 128 each has a way of its own through a step, together another.
std::vector<Case> optional_loops() {
  Case bad_key = loop("alibi_128_bad_key", {.seq_q = 290, .seq_kv = 300, .heads_q = 1, .heads_kv = 1, .head_dim = 128});
  bad_key.problem.alibi = bad_key.problem.causal = true, bad_key.nan_key = 240;
  return {
      bad_key,
      loop("alibi_128", {.seq_q = 330, .seq_kv = 520, .heads_q = 1, .heads_kv = 1, .head_dim = 128, .alibi = true}),
      loop("softcap_128", {.seq_q = 330, .seq_kv = 300, .heads_q = 2, .heads_kv = 1, .head_dim = 128, .softcap = 2}),
      loop("dropout_128",
           {.seq_q = 260, .seq_kv = 330, .heads_q = 1, .heads_kv = 1, .head_dim = 128, .causal = true, .dropout_p = 0.3f}),
      loop("softcap_alibi_128",
           {.seq_q = 200, .seq_kv = 330, .heads_q = 3, .heads_kv = 1, .head_dim = 128, .softcap = 20, .alibi = true}),
      loop("alibi_64", {.seq_q = 330, .seq_kv = 420, .heads_q = 1, .heads_kv = 1, .head_dim = 64, .alibi = true}),
      loop("dropout_64",
           {.seq_q = 260, .seq_kv = 330, .heads_q = 1, .heads_kv = 1, .head_dim = 64, .causal = true, .dropout_p = 0.3f}),
  };
}

/// Biases of 16 bits, which are loaded in pairs where their rows lie an even number of elements apart and all keys of a
/// tile exist; the last tile has fewer.
std::vector<Case> bias_loops() {
  std::vector<Case> cases = {
      loop("bias_64", {.seq_q = 150, .seq_kv = 200, .heads_q = 2, .heads_kv = 1, .head_dim = 64}),
      loop("bias_128", {.seq_q = 200, .seq_kv = 330, .heads_q = 2, .heads_kv = 2, .head_dim = 128}),
      loop("bias_128_causal", {.seq_q = 270, .seq_kv = 200, .heads_q = 2, .heads_kv = 1, .head_dim = 128, .causal = true}),
      loop("bias_136_alibi", {.seq_q = 150, .seq_kv = 200, .heads_q = 1, .heads_kv = 1, .head_dim = 136, .alibi = true}),
      loop("bias_264", {.seq_q = 70, .seq_kv = 140, .heads_q = 1, .heads_kv = 1, .head_dim = 264}),
  };
  for (Case& c : cases) c.problem.bias = over(c.problem, false, true, true, Dtype::bfloat16), c.dbias = true;
  cases[1].infinite_bias = true;
  return cases;
}

/// Tasks that take turns at adding to sums in memory (tests/plan/sm90_backward_test.cpp): one after another under a causal
/// mask, all at once without one, in a window, with heads of a group split, with queries and keys that nobody sees.
std::vector<Case> turns() {
  Case hidden_keys = loop("hidden_keys", {.seq_q = 440, .seq_kv = 420, .heads_q = 2, .heads_kv = 2, .head_dim = 128});
  hidden_keys.problem.causal = hidden_keys.problem.key_lengths = true;
  hidden_keys.key_lengths = {150};
  Case bad_key = loop("bad_key_64", {.seq_q = 600, .seq_kv = 600, .heads_q = 1, .heads_kv = 1, .head_dim = 64});
  bad_key.problem.causal = true, bad_key.nan_key = 300;
  Case packed = loop("packed_128", {.seq_q = 300, .seq_kv = 280, .heads_q = 4, .heads_kv = 2, .head_dim = 128});
  packed.problem.packed = packed.problem.causal = true;
  packed.problem.batch = 3, packed.problem.total_q = 371, packed.problem.total_kv = 420;
  packed.cu_seqlens_q = {0, 300, 301, 371}, packed.cu_seqlens_kv = {0, 280, 350, 420};
  return {
      hidden_keys,
      bad_key,
      packed,
      loop("causal_64", {.seq_q = 500, .seq_kv = 500, .heads_q = 4, .heads_kv = 2, .head_dim = 64, .causal = true}),
      loop("causal_128", {.seq_q = 350, .seq_kv = 350, .heads_q = 2, .heads_kv = 2, .head_dim = 128, .causal = true}),
      loop("full_64", {.seq_q = 400, .seq_kv = 500, .heads_q = 3, .heads_kv = 3, .head_dim = 64}),
      loop("full_128", {.seq_q = 400, .seq_kv = 390, .heads_q = 3, .heads_kv = 3, .head_dim = 128}),
      loop("short_queries_128",
           {.seq_q = 150, .seq_kv = 600, .heads_q = 7, .heads_kv = 7, .head_dim = 128, .causal = true}),
      loop("window_96", {.seq_q = 500,
                         .seq_kv = 450,
                         .heads_q = 1,
                         .heads_kv = 1,
                         .head_dim = 96,
                         .window_left = 70,
                         .window_right = 30}),
      loop("left_40", {.seq_q = 700, .seq_kv = 700, .heads_q = 2, .heads_kv = 2, .head_dim = 40, .window_left = 130}),
      loop("empty_rows", {.seq_q = 900, .seq_kv = 70, .heads_q = 1, .heads_kv = 1, .head_dim = 64, .causal = true}),
      loop("softcap_64",
           {.seq_q = 300, .seq_kv = 300, .heads_q = 2, .heads_kv = 1, .head_dim = 64, .softcap = 20, .causal = true}),
      loop("gqa_split_64", {.seq_q = 300, .seq_kv = 300, .heads_q = 6, .heads_kv = 1, .head_dim = 64, .causal = true}),
      loop("gqa_split_96_80",
           {.seq_q = 210, .seq_kv = 200, .heads_q = 6, .heads_kv = 1, .head_dim = 96, .head_dim_v = 80, .causal = true}),
      loop("gqa_split_128", {.seq_q = 300, .seq_kv = 300, .heads_q = 6, .heads_kv = 1, .head_dim = 128, .causal = true}),
  };
}

/// A NaN in a query whose tile two warpgroups share, and heads of a group whose dK and dV are summed in memory.
std::vector<Case> nan_loops() {
  Case wide = loop("nan_dout_128", {.seq_q = 300, .seq_kv = 300, .heads_q = 1, .heads_kv = 1, .head_dim = 128});
  Case split = loop("nan_dout_gqa_split", {.seq_q = 200, .seq_kv = 300, .heads_q = 6, .heads_kv = 1, .head_dim = 64});
  wide.problem.causal = split.problem.causal = true;
  wide.nan_dout = split.nan_dout = 100;
  return {wide, split};
}

/// Row statistics that products subtract in parts of 16 bits: more than float16 has room for in some rows of a tile or in
/// all, few bits of it, rows without probabilities among others, a scale below 0, and rows past the last query.
std::vector<Case> statistics_loops() {
  const auto make = [](const char* name, std::int64_t dim, Dtype dtype, Draw draw, bool causal) {
    Case c = loop(name, {.seq_q = 150, .seq_kv = 330, .heads_q = 2, .heads_kv = 2, .head_dim = dim, .causal = causal});
    c.problem.dtype = dtype, c.draw = draw;
    return c;
  };
  std::vector<Case> cases = {make("statistics_some_128", 128, Dtype::float16, Draw::growing, true),
                             make("statistics_all_64", 64, Dtype::float16, Draw::falling, false),
                             make("statistics_large_128", 128, Dtype::bfloat16, Draw::normal, false),
                             make("statistics_denormal_128", 128, Dtype::float16, Draw::denormal, false),
                             make("statistics_empty_rows_128", 128, Dtype::float16, Draw::large, true),
                             make("statistics_scale_64", 64, Dtype::bfloat16, Draw::normal, true),
                             make("statistics_scale_128", 128, Dtype::float16, Draw::large, false)};
  for (const std::size_t i : {0, 1}) cases[i].problem.seq_kv = 500, cases[i].problem.scale = 0.02f;
  cases[2].problem.scale = 1000.0f;  // an lse of about 30000, of which each part tells
  cases[4].problem.seq_q = 500;
  for (const std::size_t i : {5, 6}) cases[i].problem.scale = -0.2f;
  return cases;
}

/// The structures differ in how they loop and what they must not multiply, not in dtype: a part of the cases is enough.
std::vector<Case> structure_cases() {
  std::vector<Case> cases = contract_cases(Dtype::bfloat16);
  std::erase_if(cases, [](const Case& c) {
    for (const char* name : {"plain", "gqa", "causal", "window", "mask_shared", "seqused", "packed_causal", "softcap",
                             "bias_heads", "dropout", "nan_key", "nan_value", "head_dim_40"}) {
      if (c.name == name) return false;
    }
    return true;
  });
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Bias, BackwardSm90Loops, ::testing::ValuesIn(bias_loops()), case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, BackwardSm90,
                         ::testing::ValuesIn(telling_share_of(contract_cases(Dtype::bfloat16), 6, 2)), case_name);
INSTANTIATE_TEST_SUITE_P(Float16, BackwardSm90, ::testing::ValuesIn([] {
                           std::vector<Case> cases = contract_cases(Dtype::float16);
                           cases.resize(12);  // the sizes
                           return some_of(cases, 6);
                         }()),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Slopes, BackwardSm90, ::testing::Values(contract_case("softcap_negative_scale", Dtype::bfloat16)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(NanGradients, BackwardSm90, ::testing::ValuesIn(every_other(nan_gradients(Dtype::bfloat16))),
                         case_name);
INSTANTIATE_TEST_SUITE_P(NanGradients, BackwardSm90Wide,
                         ::testing::ValuesIn(share_of(nan_gradients(Dtype::bfloat16), 4, 1)), case_name);
INSTANTIATE_TEST_SUITE_P(NanBesideHiddenScores, BackwardSm90,
                         ::testing::ValuesIn(nan_beside_hidden_scores(Dtype::bfloat16)), case_name);
INSTANTIATE_TEST_SUITE_P(NanBesideHiddenScores, BackwardSm90Wide,
                         ::testing::ValuesIn(every_other(nan_beside_hidden_scores(Dtype::bfloat16))), case_name);
INSTANTIATE_TEST_SUITE_P(NanGradients, BackwardSm90Loops, ::testing::ValuesIn(nan_loops()), case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, BackwardSm90Deterministic, ::testing::ValuesIn(share_of(structure_cases(), 2, 0)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, BackwardSm90Wide, ::testing::ValuesIn(share_of(structure_cases(), 2, 1)), case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, BackwardSm90Loops, ::testing::ValuesIn(deterministic(long_loops())), case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, BackwardSm90Turns, ::testing::ValuesIn(share_of(deterministic(turns()), 5, 0)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Options, BackwardSm90Loops, ::testing::ValuesIn(optional_loops()), case_name);
INSTANTIATE_TEST_SUITE_P(Statistics, BackwardSm90Loops, ::testing::ValuesIn(statistics_loops()), case_name);
INSTANTIATE_TEST_SUITE_P(Sums, BackwardSm90Loops, ::testing::ValuesIn(summing_loops()), case_name);

}  // namespace
}  // namespace flash_attention::testing
