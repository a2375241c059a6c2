// K and V in 4 bits, in the emulator.
#include "emulator/host/seed.h"
#include "kernels/emulated.h"
#include "support/append_groups.h"
#include "support/cases/group_codes.h"

namespace flash_attention::testing {
namespace {

Target grouped_decode(const Case& c) {
  const int arch = std::hash<std::string>{}(c.name) % 2 == 0 ? 80 : 90;
  emulator::set_num_sms(arch == 80 ? 5 : 3);
  emulator::set_seed(std::hash<std::string>{}(c.name));
  return {.device = {.kind = DeviceKind::emulator, .emulated_arch = arch}, .kernel = "decode/sm80"};
}

class GroupedKeys : public ::testing::TestWithParam<Case> {
  void TearDown() override { emulator::set_num_sms(0); }
};
class GroupedKeysPortable : public ::testing::TestWithParam<Case> {};

TEST_P(GroupedKeys, DecodeSm80) { check(GetParam(), grouped_decode(GetParam())); }

TEST_P(GroupedKeysPortable, Portable) { check_emulated(GetParam(), "forward/portable", Pass::forward); }

/// Those that decode/sm80 takes.
std::vector<Case> grouped(Dtype dtype) {
  std::vector<Case> cases = group_cases(dtype);
  std::erase_if(cases, [](const Case& c) {
    return c.problem.seq_q > 16 || c.problem.head_dim % 64 != 0 || c.name.ends_with("gaps") || c.problem.causal ||
           c.problem.mask.present || c.problem.left_padding;
  });
  return cases;
}

/// Runs so long that two groups of warps take tiles in turn.
Case grouped_runs() {
  Case c = base("nvfp4_two_long_runs", Dtype::bfloat16);
  Problem& p = c.problem;
  p.batch = p.seq_q = p.heads_kv = 1, p.heads_q = 3, p.seq_kv = 16500, p.head_dim = 128;
  p.kv_dtype = Dtype::nvfp4, p.seqused_kv = true, c.seqused_kv = {16390};
  return c;
}

INSTANTIATE_TEST_SUITE_P(Runs, GroupedKeys, ::testing::Values(grouped_runs()), case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, GroupedKeys, ::testing::ValuesIn(grouped(Dtype::bfloat16)), case_name);
INSTANTIATE_TEST_SUITE_P(Float16, GroupedKeys, ::testing::ValuesIn(some_of(grouped(Dtype::float16), 5)), case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, GroupedKeysPortable, ::testing::ValuesIn(some_of(group_cases(Dtype::bfloat16), 5)),
                         case_name);

class GroupCodes : public ::testing::TestWithParam<std::tuple<Dtype, Dtype, const char*>> {};

TEST_P(GroupCodes, AreWhatTheyAreWorth) {
  const auto [codes, dtype, kernel] = GetParam();
  check_all_codes(codes, dtype, {.device = {.kind = DeviceKind::emulator, .emulated_arch = 80}, .kernel = kernel});
}

std::string codes_name(const ::testing::TestParamInfo<GroupCodes::ParamType>& info) {
  const auto [codes, dtype, kernel] = info.param;
  return std::string(to_string(codes)) + "_" + std::string(to_string(dtype)) +
         (std::string_view(kernel) == "decode/sm80" ? "_decode" : "_portable");
}

INSTANTIATE_TEST_SUITE_P(Decode, GroupCodes,
                         ::testing::Combine(::testing::Values(Dtype::nvfp4, Dtype::mxfp4, Dtype::int4),
                                            ::testing::Values(Dtype::float16, Dtype::bfloat16),
                                            ::testing::Values("decode/sm80")),
                         codes_name);
INSTANTIATE_TEST_SUITE_P(Portable, GroupCodes,
                         ::testing::Values(std::tuple{Dtype::nvfp4, Dtype::float32, "forward/portable"},
                                           std::tuple{Dtype::mxfp4, Dtype::bfloat16, "forward/portable"},
                                           std::tuple{Dtype::int4, Dtype::float16, "forward/portable"}),
                         codes_name);

TEST(AppendGroups, AreQuantised) {
  const Device device{.kind = DeviceKind::emulator, .emulated_arch = 80};
  check_append_groups(device, Dtype::nvfp4, Dtype::bfloat16, 16, false);
  check_append_groups(device, Dtype::mxfp4, Dtype::float16, 32, false);
  check_append_groups(device, Dtype::int4, Dtype::bfloat16, 128, false);
  check_append_groups(device, Dtype::nvfp4, Dtype::float16, 16, true);
  if (!with_long_tail()) return;
  check_append_groups(device, Dtype::mxfp4, Dtype::float32, 32, true);
  check_append_groups(device, Dtype::int4, Dtype::float16, 64, true);
}

}  // namespace
}  // namespace flash_attention::testing
