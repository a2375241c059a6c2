// Forward mode and second derivatives of covering arrays in the emulator: a few problems of each kernel in `make test`, all of
// them in the long tail.
#include <gtest/gtest.h>

#include "emulator/host/seed.h"
#include "fuzz/check_problem.h"
#include "support/cases/derivative_cases.h"

namespace flash_attention::fuzz {
namespace {

class CoverDerivatives : public ::testing::TestWithParam<const char*> {};

TEST_P(CoverDerivatives, MatchDifferencesOfTheOracle) {
  const std::string kernel = GetParam();
  const testing::Target target{
      .device = {.kind = DeviceKind::emulator, .emulated_arch = kernel.ends_with("sm90") ? 90 : 80},
      .kernel = kernel,
      .pass = kernel.starts_with("tangent") ? Pass::tangent : Pass::second};
  Domain domain = domain_of(kernel);
  domain.without(layout, {"broadcast"});  // heads and sequences that share keys would share their tangents
  domain.only(inputs, {"normal"}).only(invariant, {"off"}).only(program, {"off", "mask"}).only(dprogram, {"off"});
  int left = testing::with_long_tail() ? 1 << 20 : 2;
  for (const GeneratedProblem& problem : problems(domain, 1, array_seed(), {.longest = 200, .max_products = 1e6})) {
    if (left == 0) break;
    if (!testing::has_derivatives(problem.c) || !testing::rejection(problem.c, target).empty()) continue;
    --left;
    emulator::set_seed(static_cast<std::uint64_t>(problem.number));
    SCOPED_TRACE("problem " + std::to_string(problem.number) + ": " + problem.c.name + " " + to_string(problem.c.problem));
    testing::check_derivatives(problem.c, target);
  }
  EXPECT_TRUE(testing::with_long_tail() || left == 0) << "too few problems";
}

INSTANTIATE_TEST_SUITE_P(Kernels, CoverDerivatives,
                         ::testing::Values("tangent/portable", "tangent/sm80", "tangent/sm90", "second/portable",
                                           "second/sm80"),
                         [](const auto& part) {
                           std::string name = part.param;
                           name[name.find('/')] = '_';
                           return name;
                         });

}  // namespace
}  // namespace flash_attention::fuzz
