// forward/sm90 with head dimensions above 256, in the emulator: two warpgroups that share their rows.
#include "kernels/emulated.h"
#include "kernels/wide_cases.h"

namespace flash_attention::testing {
namespace {

using ForwardSm90Wide = ::testing::TestWithParam<Case>;

TEST_P(ForwardSm90Wide, KeepsTheContract) { check_sm90(GetParam(), "forward/sm90", Pass::forward, 2); }

/// Masks that choose the blocks.
std::vector<Case> lists_of_wide_heads() {
  return {documents_case("wide_documents", 521, 260, 4,
                         [](Case& c, Problem& p) {
                           p.head_dim = 512, p.head_dim_v = 264, p.heads_q = p.heads_kv = 1, c.nan_value = 270;
                         }),
          // Rows that see nothing but -inf, in blocks that no mask hides a part of.
          documents_case("wide_infinite_bias", 300, 300, 4, [](Case& c, Problem& p) {
            p.head_dim = 384, p.head_dim_v = 64, p.heads_q = p.heads_kv = 1, p.seq_q = 70;
            p.bias = over(p, false, true, true, p.dtype), c.infinite_bias = true;
          })};
}

INSTANTIATE_TEST_SUITE_P(Loops, ForwardSm90Wide, ::testing::ValuesIn(loops_of_wide_heads()), case_name);
using PairsOfWidePages = ::testing::TestWithParam<Case>;

TEST_P(PairsOfWidePages, KeepTheContract) {
  emulator::set_seed(std::hash<std::string>{}(GetParam().name));
  emulator::set_num_sms(2);
  check(GetParam(), {.device = {.kind = DeviceKind::emulator, .emulated_arch = 90},
                     .kernel = "forward/sm90",
                     .tile = TileSize{128, 128}});
  emulator::set_num_sms(0);
}

INSTANTIATE_TEST_SUITE_P(Loops, PairsOfWidePages, ::testing::ValuesIn(pairs_of_wide_pages()), case_name);
INSTANTIATE_TEST_SUITE_P(Pages, ForwardSm90Wide, ::testing::ValuesIn(pages_of_wide_heads()), case_name);
INSTANTIATE_TEST_SUITE_P(Lists, ForwardSm90Wide, ::testing::ValuesIn(lists_of_wide_heads()), case_name);

}  // namespace
}  // namespace flash_attention::testing
