#include "kernels/emulated.h"
#include "kernels/ladder/rungs.h"

namespace flash_attention::testing {
namespace {

class Ladder : public ::testing::TestWithParam<Climb> {};

TEST_P(Ladder, Emulated) {
  const auto& [rung, c] = GetParam();
  emulator::set_seed(std::hash<std::string>{}(c.name));
  check(c, {.device = {.kind = DeviceKind::emulator, .emulated_arch = rung.arch},
            .kernel = std::string(rung.name),
            .pass = rung.pass});
}

// Every kind of size, layout and mask that the ladder takes, in few configurations: each is compiled for every rung.
const std::vector<std::string> names{
    "plain",  "long_keys", "long_queries",        "one_query",      "no_key",      "gqa",         "gaps",
    "causal", "growing",   "causal_more_queries", "growing_causal", "head_dim_40", "head_dim_128"};

INSTANTIATE_TEST_SUITE_P(Forward, Ladder,
                         ::testing::ValuesIn(climbs(Pass::forward, ladder_cases({Dtype::bfloat16}, names))), climb_name);
INSTANTIATE_TEST_SUITE_P(ForwardOtherTypes, Ladder,
                         ::testing::ValuesIn(climbs(Pass::forward, ladder_cases({Dtype::float16, Dtype::float32},
                                                                                {"plain", "head_dim_8"}))),
                         climb_name);
INSTANTIATE_TEST_SUITE_P(Backward, Ladder,
                         ::testing::ValuesIn(climbs(Pass::backward, ladder_cases({Dtype::bfloat16}, names))), climb_name);
INSTANTIATE_TEST_SUITE_P(BackwardOtherTypes, Ladder,
                         ::testing::ValuesIn(climbs(Pass::backward, ladder_cases({Dtype::float16, Dtype::float32},
                                                                                 {"plain", "head_dim_8"}))),
                         climb_name);

}  // namespace
}  // namespace flash_attention::testing
