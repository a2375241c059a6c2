// decode/mla_sm90 in the emulator, on GPUs of several sizes.
#include "emulator/host/seed.h"
#include "kernels/decode/mla_cases.h"
#include "kernels/emulated.h"

namespace flash_attention::testing {
namespace {

using DecodeMla = ::testing::TestWithParam<Case>;

/// A block takes several items, or blocks share them: one of the two for each case, both in the long tail.
TEST_P(DecodeMla, Emulated) {
  for (const int sms : {2, 11}) {
    if (!with_long_tail() && (std::hash<std::string>{}(GetParam().name) % 2 == 0) != (sms == 2)) continue;
    emulator::set_num_sms(sms);
    emulator::set_seed(std::hash<std::string>{}(GetParam().name) + static_cast<unsigned>(sms));
    check(GetParam(), {.device = {.kind = DeviceKind::emulator, .emulated_arch = 90}, .kernel = "decode/mla_sm90"});
  }
  emulator::set_num_sms(0);
}

INSTANTIATE_TEST_SUITE_P(Bfloat16, DecodeMla, ::testing::ValuesIn(mla_cases(Dtype::bfloat16)), case_name);
INSTANTIATE_TEST_SUITE_P(Float16, DecodeMla, ::testing::ValuesIn(some_of(mla_cases(Dtype::float16), 12)), case_name);

}  // namespace
}  // namespace flash_attention::testing
