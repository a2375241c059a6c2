// forward/sm90 in the emulator: the whole contract, under several schedules.
#include "emulator/seed.h"
#include "support/contract.h"

namespace flash_attention::testing {
namespace {

constexpr Device gpu{.kind = DeviceKind::emulator, .emulated_arch = 90};

class ForwardSm90 : public ::testing::TestWithParam<Case> {};

TEST_P(ForwardSm90, KeepsTheContract) {
  emulator::set_num_sms(3);  // so that a block takes several tiles, one after another
  for (const std::uint64_t seed : {1, 2}) {
    emulator::set_seed(seed);
    check(GetParam(), {.device = gpu, .kernel = "forward/sm90", .pass = Pass::forward});
  }
}

INSTANTIATE_TEST_SUITE_P(Float16, ForwardSm90, ::testing::ValuesIn(contract_cases(Dtype::float16)), case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, ForwardSm90, ::testing::ValuesIn(contract_cases(Dtype::bfloat16)), case_name);

}  // namespace
}  // namespace flash_attention::testing
