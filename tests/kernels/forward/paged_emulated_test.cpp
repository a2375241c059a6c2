// Prompts whose keys lie in pages, on forward/sm90 and forward/sm80 in the emulator.
#include "kernels/emulated.h"
#include "kernels/forward/paged_cases.h"

namespace flash_attention::testing {
namespace {

using PagedPrompts = ::testing::TestWithParam<Case>;

TEST_P(PagedPrompts, ByBoxesOfTma) {
  emulator::set_num_sms(3);  // so that a block takes several tiles, one after another
  emulator::set_seed(std::hash<std::string>{}(GetParam().name));
  check(GetParam(), {.device = {.kind = DeviceKind::emulator, .emulated_arch = 90}, .kernel = "forward/sm90"});
  emulator::set_num_sms(0);
}

INSTANTIATE_TEST_SUITE_P(Bfloat16, PagedPrompts, ::testing::ValuesIn(paged_prompts(Dtype::bfloat16)), case_name);

using PagedRows = ::testing::TestWithParam<Case>;

TEST_P(PagedRows, ByCopiesOfRows) { check_emulated(GetParam(), "forward/sm80", Pass::forward); }

INSTANTIATE_TEST_SUITE_P(Bfloat16, PagedRows, ::testing::ValuesIn(share_of(paged_prompts(Dtype::bfloat16), 4, 2)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Odd, PagedRows, ::testing::ValuesIn(odd_pages(Dtype::float16)), case_name);

/// Warps have 32 rows and more of a tile that was asked for; a tile of 32 keys has boxes of 32.
TEST(PagedTiles, CanBeAskedFor) {
  Case c = paged_prompts(Dtype::bfloat16)[1];
  c.problem.seq_q = 90;
  for (const auto& [arch, tile] : {std::pair{80, TileSize{32, 128}}, {80, {128, 32}}, {90, {64, 32}}, {90, {128, 64}}}) {
    const std::string kernel = "forward/sm" + std::to_string(arch);
    SCOPED_TRACE(kernel + ", " + std::to_string(tile.block_q) + " queries");
    emulator::set_seed(7);
    check(c, {.device = {.kind = DeviceKind::emulator, .emulated_arch = arch}, .kernel = kernel, .tile = tile});
  }
}

/// Left padding without pages.
TEST(LeftPadding, HidesKeysOnSm90) {
  for (const Case& c : cache_cases(Dtype::bfloat16)) {
    if (!c.problem.left_padding || c.problem.page_size != 0) continue;
    SCOPED_TRACE(c.name);
    check(c, {.device = {.kind = DeviceKind::emulator, .emulated_arch = 90}, .kernel = "forward/sm90"});
  }
}

}  // namespace
}  // namespace flash_attention::testing
