// Masks that were prepared before the call, by every family of kernels: the bits that the call itself would find.
#include "kernels/prepared_masks.h"

namespace flash_attention::testing {
namespace {

class PreparedMasks : public ::testing::TestWithParam<PreparedCase> {
 protected:
  void SetUp() override { emulator::set_num_sms(2); }
  void TearDown() override { emulator::set_num_sms(0); }
};

TEST_P(PreparedMasks, GiveTheSameResults) {
  emulator::set_seed(3);
  check_prepared(GetParam(), {.kind = DeviceKind::emulator, .emulated_arch = GetParam().arch});
}

INSTANTIATE_TEST_SUITE_P(Kernels, PreparedMasks, ::testing::ValuesIn(prepared_cases()), prepared_name);

}  // namespace
}  // namespace flash_attention::testing
