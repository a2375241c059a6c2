// backward/sm90 on a GPU: the whole contract, with sums in memory and without.
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

INSTANTIATE_TEST_SUITE_P(Contract, BackwardSm90, ::testing::ValuesIn(cases()), case_name);

}  // namespace
}  // namespace flash_attention::testing
