#include "kernels/emulated.h"

// Statistics of every kernel that computes them, and their gradients.

namespace flash_attention::testing {
namespace {

/// forward/key_mass_sm90 in each of its tiles of keys, several of them and of queries, whole ones and edges.
std::vector<Case> tiles_of_key_mass() {
  std::vector<Case> cases(3);
  cases[0].name = "key_mass_256_keys";
  cases[0].problem = {.batch = 1, .seq_q = 389, .seq_kv = 601, .heads_q = 2, .heads_kv = 1, .head_dim = 40, .window_left = 300};
  cases[1].name = "key_mass_512_keys";
  cases[1].problem = {.batch = 1, .seq_q = 263, .seq_kv = 1091, .heads_q = 1, .heads_kv = 1, .head_dim = 72, .causal = true};
  cases[2].name = "key_mass_late_maximum";
  cases[2].problem = {.batch = 1, .seq_q = 263, .seq_kv = 1091, .heads_q = 1, .heads_kv = 1, .head_dim = 128};
  cases[2].draw = Draw::growing;
  for (Case& c : cases) c.problem.dtype = Dtype::bfloat16, c.problem.return_key_mass = true;
  return cases;
}

using PortableStatistics = ::testing::TestWithParam<Case>;
using Sm80Statistics = ::testing::TestWithParam<Case>;
using Sm90Statistics = ::testing::TestWithParam<Case>;

TEST_P(PortableStatistics, Forward) { check_emulated(GetParam(), "forward/portable", Pass::forward); }
TEST_P(PortableStatistics, Backward) { check_emulated(GetParam(), "backward/portable", Pass::backward); }
TEST_P(Sm80Statistics, Forward) { check_emulated(GetParam(), "forward/sm80", Pass::forward); }
TEST_P(Sm90Statistics, Forward) { check_sm90(GetParam(), "forward/sm90", Pass::forward, 2); }

INSTANTIATE_TEST_SUITE_P(Float32, PortableStatistics, ::testing::ValuesIn(share_of(statistics_cases(Dtype::float32), 6, 1)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, Sm80Statistics, ::testing::ValuesIn(share_of(statistics_cases(Dtype::bfloat16), 5, 0)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(TilesOfKeyMass, Sm90Statistics, ::testing::ValuesIn(tiles_of_key_mass()), case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, Sm90Statistics, ::testing::ValuesIn(share_of(statistics_cases(Dtype::bfloat16), 5, 3)),
                         case_name);

}  // namespace
}  // namespace flash_attention::testing
