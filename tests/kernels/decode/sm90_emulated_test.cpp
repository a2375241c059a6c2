// decode/sm90 in the emulator: what differs from decode/sm80 is who loads, so boxes of every kind, edges of tiles and
// stages that are used again, with the same bits as decode/sm80.
#include "emulator/host/seed.h"
#include "kernels/decode/cases.h"
#include "kernels/emulated.h"
#include "support/oracle/attempt.h"

namespace flash_attention::testing {
namespace {

constexpr Device tma_device{.kind = DeviceKind::emulator, .emulated_arch = 90};

using DecodeSm90 = ::testing::TestWithParam<Case>;

/// Few blocks, so that each goes through several items, or more blocks than items.
void set_num_sms(const Case& c) {
  const bool many = c.name.size() % 3 == 0 || c.name.starts_with("shared");
  emulator::set_num_sms(c.name.starts_with("eight_sms") ? 8 : many ? 40 : 2);
}

TEST_P(DecodeSm90, Emulated) {
  set_num_sms(GetParam());
  emulator::set_seed(std::hash<std::string>{}(GetParam().name));
  check(GetParam(), {.device = tma_device, .kernel = "decode/sm90"});
  emulator::set_num_sms(0);
}

using DecodeSm90Bits = ::testing::TestWithParam<Case>;

TEST_P(DecodeSm90Bits, AreThoseOfDecodeSm80) {
  const Case& c = GetParam();
  set_num_sms(c);
  const Expected expected = expect(c, false);
  const Results tma = attempt(c, {.device = tma_device, .kernel = "decode/sm90"}, expected).results;
  const Results copies = attempt(c, {.device = tma_device, .kernel = "decode/sm80"}, expected).results;
  EXPECT_EQ(first_changed(tma, copies), "");
  emulator::set_num_sms(0);
}

std::vector<Case> fixed_splits() {
  std::vector<Case> cases;
  for (Case c : box_cases()) {
    if (cases.size() == 4) break;
    c.name += "_invariant", c.problem.invariant = true, c.problem.causal = true;
    cases.push_back(c);
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Boxes, DecodeSm90, ::testing::ValuesIn(box_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(Wide, DecodeSm90, ::testing::ValuesIn(wide_rows()), case_name);
INSTANTIATE_TEST_SUITE_P(FixedSplits, DecodeSm90, ::testing::ValuesIn(fixed_splits()), case_name);
INSTANTIATE_TEST_SUITE_P(Contract, DecodeSm90, ::testing::ValuesIn(share_of(few_queries(Dtype::bfloat16), 6, 1)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Runs, DecodeSm90, ::testing::ValuesIn(long_and_many()), case_name);
INSTANTIATE_TEST_SUITE_P(Shared, DecodeSm90, ::testing::ValuesIn(shared_items()), case_name);
INSTANTIATE_TEST_SUITE_P(Shared, DecodeSm90Bits, ::testing::ValuesIn(shared_items()), case_name);
INSTANTIATE_TEST_SUITE_P(Runs, DecodeSm90Bits, ::testing::ValuesIn(long_and_many()), case_name);
INSTANTIATE_TEST_SUITE_P(Wide, DecodeSm90Bits, ::testing::ValuesIn(share_of(wide_rows(), 3, 1)), case_name);
INSTANTIATE_TEST_SUITE_P(Boxes, DecodeSm90Bits, ::testing::ValuesIn(share_of(box_cases(), 3, 0)), case_name);

}  // namespace
}  // namespace flash_attention::testing
