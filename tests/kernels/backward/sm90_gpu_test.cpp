// backward/sm90 on a GPU: the whole contract, with sums in memory and without.
#include <random>

#include "kernels/wide_cases.h"
#include "support/cases/contract.h"
#include "support/gpu.h"

namespace flash_attention::testing {
namespace {

const Target target{.device = {.kind = DeviceKind::cuda}, .kernel = "backward/sm90", .pass = Pass::backward};

using BackwardSm90 = ::testing::TestWithParam<Case>;

TEST_P(BackwardSm90, KeepsTheContract) {
  REQUIRE_GPU(90);
  check(GetParam(), target);
}

TEST_P(BackwardSm90, DeterministicKeepsTheContractAndItsBits) {
  REQUIRE_GPU(90);
  Case c = GetParam();
  c.problem.deterministic = true;
  check(c, target);
  check_reproducible(c, target);
}

/// The contract, and longer loops in which slots are used again and again.
std::vector<Case> cases() {
  std::vector<Case> all = contract_cases(Dtype::bfloat16);
  for (const Case& c : contract_cases(Dtype::float16)) all.push_back(c);
  for (const std::int64_t head_dim : {64, 96, 128, 256}) {
    for (const bool causal : {false, true}) {
      Case c;
      c.name = "long_loop_" + std::to_string(head_dim) + (causal ? "_causal" : "_full");
      c.problem = {.seq_q = 450,
                   .seq_kv = 390,
                   .heads_q = 6,
                   .heads_kv = 2,
                   .head_dim = head_dim,
                   .dtype = Dtype::bfloat16,
                   .causal = causal};
      all.push_back(c);
    }
  }
  return all;
}

/// Packed sequences of all lengths, zero included, with a NaN somewhere: of the next sequence, or of a query that some of
/// its keys do not see.
std::vector<Case> packed_columns() {
  std::vector<Case> cases;
  std::mt19937 random(20);
  const auto below = [&](int end) { return static_cast<std::int32_t>(random() % static_cast<unsigned>(end)); };
  for (int n = 0; n < 16; ++n) {
    std::vector<std::int32_t> q(5), kv(5);
    for (int i = 0; i < 5; ++i) q[i] = below(4) == 0 ? 0 : 1 + below(300), kv[i] = below(4) == 0 ? q[i] : below(300);
    q[below(5)] = 1 + below(300);
    kv[below(5)] = 1 + below(300);
    cases.push_back(wide(("columns_packed_" + std::to_string(n)).c_str(), 512, 512, 0, 0, [](Case&, Problem&) {}));
    Case& c = cases.back();
    c.problem.heads_q = 4, c.problem.heads_kv = n % 2 == 0 ? 2 : 4, c.problem.causal = n % 4 < 2;
    pack(c, q, kv);
    c.nan_sequence = below(5);
    const std::int32_t row = below(150);
    if (n % 3 == 0) c.nan_query = row;
    if (n % 3 == 1) c.nan_dout = row;
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Contract, BackwardSm90, ::testing::ValuesIn(cases()), case_name);
INSTANTIATE_TEST_SUITE_P(Columns, BackwardSm90, ::testing::ValuesIn(column_loops()), case_name);
INSTANTIATE_TEST_SUITE_P(PackedColumns, BackwardSm90, ::testing::ValuesIn(packed_columns()), case_name);

}  // namespace
}  // namespace flash_attention::testing
