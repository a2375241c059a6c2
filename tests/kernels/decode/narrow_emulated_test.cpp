// K and V in 8 bits, in the emulator.
#include "emulator/host/seed.h"
#include "kernels/emulated.h"
#include "support/cases/make_case.h"

namespace flash_attention::testing {
namespace {

/// Every other case on sm_80, where e4m3 is converted in another way.
Target decode(const Case& c) {
  const int arch = std::hash<std::string>{}(c.name) % 2 == 0 ? 80 : 90;
  emulator::set_num_sms(arch == 80 ? 5 : 3);
  emulator::set_seed(std::hash<std::string>{}(c.name));
  return {.device = {.kind = DeviceKind::emulator, .emulated_arch = arch}, .kernel = "decode/sm80"};
}

class NarrowKeys : public ::testing::TestWithParam<Case> {
  void TearDown() override { emulator::set_num_sms(0); }
};
class NarrowKeysPortable : public ::testing::TestWithParam<Case> {};
class NarrowKeysBits : public NarrowKeys {};
class NarrowKeysRuns : public NarrowKeys {};

TEST_P(NarrowKeys, DecodeSm80) { check(GetParam(), decode(GetParam())); }

TEST_P(NarrowKeysPortable, Portable) { check_emulated(GetParam(), "forward/portable", Pass::forward); }

TEST_P(NarrowKeysBits, DecodeSm80) { check_narrow_bits(GetParam(), decode(GetParam())); }

TEST_P(NarrowKeysRuns, DecodeSm80) { check_narrow_bits(GetParam(), decode(GetParam())); }

TEST_P(NarrowKeysBits, Portable) {
  check_narrow_bits(GetParam(),
                    {.device = {.kind = DeviceKind::emulator, .emulated_arch = 80}, .kernel = "forward/portable"});
}

/// Those that decode/sm80 takes.
std::vector<Case> decoded(Dtype dtype) {
  std::vector<Case> cases = narrow_key_cases(dtype);
  std::erase_if(cases, [](const Case& c) { return c.problem.seq_q > 16 || c.problem.head_dim % 16 != 0; });
  return cases;
}

/// Runs so long that two groups of warps take tiles in turn.
std::vector<Case> long_runs() {
  Case scaled = base("e4m3_two_long_runs", Dtype::bfloat16);
  Problem& p = scaled.problem;
  p.batch = p.seq_q = p.heads_kv = 1, p.heads_q = 3, p.seq_kv = 16500, p.head_dim = 80, p.head_dim_v = 80;
  p.kv_dtype = Dtype::float8_e4m3, p.kv_scales = ScaleKind::head, p.seqused_kv = true, scaled.seqused_kv = {16390};
  Case tokens = scaled;
  tokens.name = "int8_token_two_long_runs";
  tokens.problem.kv_dtype = Dtype::int8, tokens.problem.kv_scales = ScaleKind::token;
  return {scaled, tokens};
}

INSTANTIATE_TEST_SUITE_P(Runs, NarrowKeysRuns, ::testing::ValuesIn(long_runs()), case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, NarrowKeys, ::testing::ValuesIn(decoded(Dtype::bfloat16)), case_name);
INSTANTIATE_TEST_SUITE_P(Float16, NarrowKeys, ::testing::ValuesIn(some_of(decoded(Dtype::float16), 16)), case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, NarrowKeysPortable, ::testing::ValuesIn(some_of(narrow_key_cases(Dtype::bfloat16), 4)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, NarrowKeysBits, ::testing::ValuesIn(some_of(decoded(Dtype::bfloat16), 5)), case_name);
INSTANTIATE_TEST_SUITE_P(Float16, NarrowKeysBits, ::testing::ValuesIn(some_of(decoded(Dtype::float16), 9)), case_name);

}  // namespace
}  // namespace flash_attention::testing
