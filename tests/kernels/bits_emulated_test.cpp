#include <algorithm>
#include <string_view>

#include "kernels/emulated.h"

namespace flash_attention::testing {
namespace {

/// Bit masks and windows of sequences, by every kernel that takes them.
struct MaskedKernel {
  const char* kernel;
  std::size_t one_in, first;
};

void check_on_its_gpu(const Case& c, const char* kernel) {
  if (std::string_view(kernel).ends_with("sm90")) return check_sm90(c, kernel, Pass::forward, 3);
  check_emulated(c, kernel, Pass::forward);
}

using BitMasks = ::testing::TestWithParam<MaskedKernel>;

TEST_P(BitMasks, Emulated) {
  const MaskedKernel of = GetParam();
  int taken = 0;
  for (const Case& c : share_of(bit_cases(Dtype::bfloat16), of.one_in, of.first)) {
    const bool windows = c.problem.bit_mask.kind == BitMaskKind::none,
               few = c.problem.seq_q <= 16 || c.problem.page_size > 0;
    if (std::string_view(of.kernel) == "forward/sm90" && !windows) continue;
    if (std::string_view(of.kernel).starts_with("decode/") && !few) continue;  // many queries without pages
    if (std::string_view(of.kernel) == "decode/sm90" && c.problem.page_size % 8 != 0) continue;
    SCOPED_TRACE(c.name);
    check_on_its_gpu(c, of.kernel);
    ++taken;
  }
  EXPECT_GE(taken, 4);
}

INSTANTIATE_TEST_SUITE_P(Kernels, BitMasks,
                         ::testing::Values(MaskedKernel{"decode/sm80", 1, 0}, MaskedKernel{"decode/sm90", 1, 0},
                                           MaskedKernel{"forward/sm80", 3, 0}, MaskedKernel{"forward/sm90", 1, 0},
                                           MaskedKernel{"forward/portable", 3, 1}),
                         [](const auto& param) {
                           std::string name = param.param.kernel;
                           std::replace(name.begin(), name.end(), '/', '_');
                           return name;
                         });

std::vector<Case> latent_bits() {
  std::vector<Case> cases;
  for (const Case& c : latent_cases(Dtype::bfloat16)) {
    if (c.name.find("drafts") != std::string::npos) cases.push_back(c);
  }
  return cases;
}

using LatentBitMasks = ::testing::TestWithParam<Case>;

TEST_P(LatentBitMasks, MlaSm90) {
  if (GetParam().problem.head_dim == 576) check_on_its_gpu(GetParam(), "decode/mla_sm90");
}
TEST_P(LatentBitMasks, DecodeSm80) { check_on_its_gpu(GetParam(), "decode/sm80"); }

INSTANTIATE_TEST_SUITE_P(Bfloat16, LatentBitMasks, ::testing::ValuesIn(latent_bits()), case_name);

}  // namespace
}  // namespace flash_attention::testing
