// K and V in 4 bits, in the emulator.
#include "emulator/host/seed.h"
#include "kernels/emulated.h"
#include "support/append_groups.h"
#include "support/cases/group_codes.h"
#include "support/cases/make_case.h"
#include "support/oracle/pages.h"

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
    return c.problem.seq_q > 16 || c.problem.head_dim % 64 != 0 || c.name.ends_with("gaps") ||
           (c.problem.causal && c.problem.seq_q > 1) || c.problem.mask.present;
  });
  return cases;
}

Case of_widths(const char* name, Dtype codes, std::int64_t group, std::int64_t head_dim, std::int64_t head_dim_v) {
  Case c = base(name, Dtype::bfloat16);
  Problem& p = c.problem;
  p.seq_q = 2, p.heads_q = 6, p.heads_kv = 2, p.head_dim = head_dim, p.head_dim_v = head_dim_v;
  p.kv_dtype = codes, p.kv_group = group, p.seqused_kv = true, c.seqused_kv = {131, 70};
  return c;
}

/// Runs of several tiles of 256 and of 128 keys, in which the copies of a tile's keys and values take turns with the
/// products; and the other widths, whose lanes have 16 columns of the last 64.
std::vector<Case> grouped_shapes() {
  std::vector<Case> cases;
  Case runs = base("nvfp4_long_runs", Dtype::bfloat16);
  Problem& p = runs.problem;
  p.batch = p.seq_q = p.heads_kv = 1, p.heads_q = 3, p.seq_kv = 8300, p.head_dim = 128;
  p.kv_dtype = Dtype::nvfp4, p.seqused_kv = true, runs.seqused_kv = {8291}, runs.draw = Draw::growing;
  cases.push_back(runs);
  runs.name = "int4_long_pages", p.kv_dtype = Dtype::int4, p.kv_group = 32, p.heads_q = 16, p.seq_kv = 3000;
  put_in_pages(runs, 16, {2999});
  cases.push_back(runs);
  Case alike = of_widths("nvfp4_128_keys", Dtype::nvfp4, 16, 128, 128);
  alike.problem.seq_kv = 701, alike.problem.seqused_kv = false, alike.seqused_kv = {};
  cases.push_back(alike);
  cases.push_back(of_widths("nvfp4_192_64", Dtype::nvfp4, 16, 192, 64));
  cases.push_back(of_widths("mxfp4_64_256", Dtype::mxfp4, 32, 64, 256));
  cases.push_back(of_widths("int4_256_192", Dtype::int4, 64, 256, 192));
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Shapes, GroupedKeys, ::testing::ValuesIn(grouped_shapes()), case_name);
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
