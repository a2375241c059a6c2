#include "support/cases/contract.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <optional>

#include "cpu/detect.h"
#include "plan/families/cpu_tiles.h"
#include "plan/kernel_table.h"
#include "support/cases/make_case.h"
#include "support/long_tail.h"

// The contract on one instruction set, that of FLASH_ATTENTION_CPU_ISA: a process for each, because the settings are read
// once. CTest sets three threads, too, whatever the machine has: so that work is split and merged.

namespace flash_attention::testing {
namespace {

struct Run {
  Case c;
  Target target;
};

/// The case with other lengths. Strides and lengths of its own that go with the old ones are left alone.
std::optional<Case> with_lengths(Case c, const char* suffix, std::int64_t seq_q, std::int64_t seq_kv) {
  Problem& p = c.problem;
  const bool own_strides = !(p.q_strides == Strides{}) || !(p.out_strides == Strides{});
  const bool other_pages = p.page_size != 0 && seq_kv != p.seq_kv;
  if (p.packed || p.seqused_q || own_strides || other_pages || p.seq_q < seq_q || p.seq_kv > seq_kv) return std::nullopt;
  c.name += suffix;
  for (ScoreTensor* t : {&p.bias, &p.mask}) {  // dense over the new lengths
    const std::int64_t rows = t->q_stride != 0 ? p.seq_q : 1, new_rows = t->q_stride != 0 ? seq_q : 1;
    for (std::int64_t* stride : {&t->batch_stride, &t->head_stride}) {
      if (*stride != 0) *stride = *stride / (rows * p.seq_kv) * new_rows * seq_kv;
    }
    if (t->q_stride != 0) t->q_stride = seq_kv;
  }
  p.seq_q = seq_q;
  p.seq_kv = seq_kv;
  make_masks_dense(p);
  return c;
}

/// With so few queries that cpu/decode takes it.
std::optional<Case> with_few_queries(const Case& c) {
  if (c.problem.heads_q / c.problem.heads_kv > 4) return std::nullopt;
  return with_lengths(c, "_few", 2, c.problem.seq_kv);
}

/// With as many rows of a key head as cpu/decode takes from this instruction set: eights, and some that make no eight.
std::optional<Case> with_decode_rows(const Case& c, CpuIsa isa) {
  const int block_q = plan::cpu_block_q(isa), rows = block_q == plan::cpu_block_q_avx512 ? 23 : std::min(11, block_q);
  const std::int64_t group = c.problem.heads_q / c.problem.heads_kv;
  if (group > rows) return std::nullopt;
  return with_lengths(c, "_decode_rows", rows / group, std::max<std::int64_t>(c.problem.seq_kv, 131));
}

/// Backward with so many keys for the rows of a key head that they are split over the threads: a third of the cases, since
/// what is split is the same for all.
void add_split_keys(const Case& c, std::vector<Run>& all) {
  if (std::hash<std::string>{}(c.name) % 3 != 0 && !with_long_tail()) return;
  if (c.problem.dtype == Dtype::float16 || c.problem.heads_q / c.problem.heads_kv > 2) return;
  if (auto few = with_lengths(c, "_few_split", 2, 1100))
    all.push_back({*few, {.kernel = "cpu/decode", .pass = Pass::backward}});
  if (auto one_block = with_lengths(c, "_split", 19, 400)) all.push_back({*one_block, {.pass = Pass::backward}});
}

/// The planner's choice; empty where no kernel takes the case.
std::string chosen_kernel(const Case& c) {
  try {
    return make_plan(c.problem, Pass::forward, device_info({}), "").kernel;
  } catch (const Error&) {
    return "";
  }
}

/// The case as forward takes it: by the planner's choice, by the name of the other kernel, and with so few queries that
/// cpu/decode takes it.
void add_forward(const Case& c, std::vector<Run>& all) {
  all.push_back({c, {}});
  const std::string chosen = chosen_kernel(c);
  if (chosen != "cpu/prefill") all.push_back({c, {.kernel = "cpu/prefill"}});
  if (chosen != "cpu/decode" && c.problem.heads_q / c.problem.heads_kv * c.problem.seq_q <= 8)
    all.push_back({c, {.kernel = "cpu/decode"}});
  if (const auto few = with_few_queries(c)) all.push_back({*few, {.kernel = "cpu/decode"}});
  if (const auto some = with_decode_rows(c, cpu::chosen_isa())) all.push_back({*some, {.kernel = "cpu/decode"}});
}

/// The case in all its passes. The oracle's results with gradients serve the runs without, which follow. Standard
/// attention, which is there to be compared with, takes one case in four of 16 bits.
void add_all(const Case& c, std::vector<Run>& all) {
  all.push_back({c, {.pass = Pass::backward}});
  if (const auto few = with_few_queries(c)) all.push_back({*few, {.kernel = "cpu/decode", .pass = Pass::backward}});
  add_forward(c, all);
  add_split_keys(c, all);
  if (c.problem.dtype != Dtype::float32 && std::hash<std::string>{}(c.name) % 4 != 0 && !with_long_tail()) return;
  all.push_back({c, {.pass = Pass::standard_forward}});
  all.push_back({c, {.pass = Pass::standard_backward}});
}

/// An instruction set shares its algorithms with the others, and differs in its vectors and tiles: those that are not this
/// machine's best take one case in three in float32 and one in eight in 16 bits, each set others. The best takes all in
/// bfloat16, half in float32, and of float16, which is float32 after a conversion of every element, one in eight. The long
/// tail has all.
std::vector<Run> runs() {
  std::vector<Run> all;
  const bool every = cpu::chosen_isa() == cpu::best_isa();
  std::size_t count = static_cast<std::size_t>(cpu::chosen_isa());
  for (Dtype dtype : {Dtype::float32, Dtype::float16, Dtype::bfloat16}) {
    const std::size_t one_in = dtype == Dtype::float16 ? 8 : dtype == Dtype::float32 ? (every ? 2 : 3) : (every ? 1 : 8);
    const auto is_taken = [&] { return with_long_tail() || ++count % one_in == 0; };
    for (const Case& c : contract_cases(dtype)) {
      if (is_taken()) add_all(c, all);
    }
    for (const Case& c : mask_cases(dtype)) {
      if (is_taken()) add_all(c, all);
    }
    for (const Case& c : cache_cases(dtype)) {
      if (is_taken()) add_forward(c, all);
    }
    for (const Case& c : bit_cases(dtype)) {
      if (is_taken()) add_forward(c, all);
    }
    for (const Case& c : latent_cases(dtype)) {
      if (is_taken()) add_forward(c, all);
    }
    for (const Case& c : narrow_key_cases(dtype)) {
      if (is_taken()) add_forward(c, all);
    }
    for (const Case& c : group_cases(dtype)) {
      if (is_taken()) add_forward(c, all);
    }
    for (const Case& c : narrow_query_cases(dtype)) {  // all that depends on the type is how O is rounded
      if (dtype == Dtype::bfloat16 || c.name == "q8_head") all.push_back({c, {.device = {}}});
    }
  }
  return all;
}

std::string run_name(const ::testing::TestParamInfo<Run>& info) {
  const std::string &kernel = info.param.target.kernel, pass(to_string(info.param.target.pass));
  std::string name = info.param.c.name + "_" + std::string(to_string(info.param.c.problem.dtype)) + "_";
  for (char c : kernel.empty() ? pass : kernel + "_" + pass) {
    name += std::isalnum(static_cast<unsigned char>(c)) != 0 ? c : '_';
  }
  return name;
}

void PrintTo(const Run& run, std::ostream* out) { *out << run.c.name << ": " << to_string(run.c.problem); }

/// Those whose bits are compared between two runs: one type is enough, the order of the sums is the same for all. So is a
/// third of them; the long tail has all.
std::vector<Run> repeated_runs() {
  std::vector<Run> all;
  std::size_t count = 0;
  for (Run& run : runs()) {
    const bool flash = run.target.pass == Pass::forward || run.target.pass == Pass::backward;
    if (!flash || run.c.problem.dtype != Dtype::bfloat16) continue;
    if (with_long_tail() || ++count % 3 == 0) all.push_back(std::move(run));
  }
  return all;
}

class CpuContract : public ::testing::TestWithParam<Run> {
 protected:
  void SetUp() override {
    if (!cpu::has_isa(cpu::chosen_isa())) GTEST_SKIP() << "this CPU has no " << to_string(cpu::chosen_isa());
  }
};

class CpuRepeated : public CpuContract {};

TEST_P(CpuContract, MatchesTheOracle) { check(GetParam().c, GetParam().target); }
TEST_P(CpuRepeated, HasTheSameBits) { check_reproducible(GetParam().c, GetParam().target); }

INSTANTIATE_TEST_SUITE_P(All, CpuContract, ::testing::ValuesIn(runs()), run_name);
INSTANTIATE_TEST_SUITE_P(All, CpuRepeated, ::testing::ValuesIn(repeated_runs()), run_name);

/// All rows of a head go over its keys together, and sums of one block of keys need the most memory there is.
TEST(CpuContractWide, FewQueriesOfTheWidestHeads) {
  if (!cpu::has_isa(cpu::chosen_isa())) GTEST_SKIP() << "this CPU has no " << to_string(cpu::chosen_isa());
  for (const Dtype dtype : {Dtype::float32, Dtype::bfloat16}) {
    Case c = base("widest_few_queries", dtype);
    c.problem.head_dim = max_head_dim, c.problem.seq_q = 3;
    check(c, {.pass = Pass::backward});
  }
}

/// A NaN in a row of few queries, in the passes that write keys at once, reaches no key that the row does not see.
TEST(CpuContractNan, OfAFewQueriesStaysBehindTheMask) {
  if (!cpu::has_isa(cpu::chosen_isa())) GTEST_SKIP() << "this CPU has no " << to_string(cpu::chosen_isa());
  for (const Dtype dtype : {Dtype::float32, Dtype::bfloat16}) {
    Case query = base("nan_query_few", dtype);
    query.problem.seq_q = 3, query.problem.causal = true;
    Case dout = query;
    query.nan_query = dout.nan_dout = 1;
    for (const Case& c : {query, dout}) check(c, {.kernel = "cpu/decode", .pass = Pass::backward});
  }
}

}  // namespace
}  // namespace flash_attention::testing
