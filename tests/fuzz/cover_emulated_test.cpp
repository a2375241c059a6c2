// Covering arrays in the emulator, one for each kernel: a part of it in `make test`, all of it and several schedules of each
// problem in the long tail. Compiling takes most of the time, so several problems share a configuration.
#include <gtest/gtest.h>

#include "emulator/seed.h"
#include "fuzz/check_problem.h"

namespace flash_attention::fuzz {
namespace {

struct Part {
  const char* kernel;
  int configurations;  // in `make test`
};

constexpr int share = 5;
constexpr Sizes small{.longest = 290, .most_products = 4e6, .empty_packs = false};

class CoverEmulated : public ::testing::TestWithParam<Part> {};

TEST_P(CoverEmulated, MatchesTheOracle) {
  const auto& [kernel, configurations] = GetParam();
  const testing::Target target{
      .device = {.kind = DeviceKind::emulator, .emulated_arch = std::string_view(kernel).ends_with("sm90") ? 90 : 80},
      .kernel = kernel,
      .pass = std::string_view(kernel).starts_with("forward") ? Pass::forward : Pass::backward};
  emulator::set_num_sms(3);  // so that a block takes several tiles, one after another
  int failed = 0;
  for (const GeneratedProblem& problem : problems(kernel, share, array_seed(), small)) {
    if (!testing::with_long_tail() && problem.number >= share * configurations) break;
    const testing::Expected expected = testing::expect(problem.c, testing::is_backward(target.pass));
    for (int schedule = 0; schedule < (testing::with_long_tail() ? 3 : 1); ++schedule) {
      emulator::set_seed(static_cast<std::uint64_t>(problem.number * 3 + schedule));
      failed += !check_problem(problem, target, expected);
    }
    if (failed > 3) break;
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, CoverEmulated,
                         ::testing::Values(Part{"forward/portable", 3}, Part{"forward/sm80", 4}, Part{"forward/sm90", 6},
                                           Part{"backward/portable", 2}, Part{"backward/sm80", 2},
                                           Part{"backward/sm90", 4}),
                         [](const auto& part) {
                           std::string name = part.param.kernel;
                           name[name.find('/')] = '_';
                           return name;
                         });

}  // namespace
}  // namespace flash_attention::fuzz
