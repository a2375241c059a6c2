// The planner's choices for architectures whose kernels are those of another one, with tiles of their own.
#include "kernels/emulated.h"
#include "plan/gpu_facts.h"

namespace flash_attention::testing {
namespace {

struct ArchCase {
  int arch;
  Pass pass;
  Case c;
};

/// Of each tile for 99 KB of shared memory a case; in the long tail all cases, on each architecture that is emulated.
std::vector<ArchCase> cases_of_archs() {
  std::vector<ArchCase> cases;
  for (const plan::GpuFacts& facts : plan::gpu_facts()) {
    if (facts.arch == 80 || facts.arch == 90 || !plan::is_emulated(facts.arch)) continue;
    for (const Case& c : contract_cases(Dtype::bfloat16)) {
      const bool telling = c.name == "head_dim_128" || c.name == "head_dim_256" || c.name == "everything";
      if (!with_long_tail() && (facts.arch != 89 || !telling)) continue;
      cases.push_back({facts.arch, Pass::forward, c});
      if (with_long_tail() || c.name == "head_dim_128") cases.push_back({facts.arch, Pass::backward, c});
    }
  }
  return cases;
}

class ArchsEmulated : public ::testing::TestWithParam<ArchCase> {};

TEST_P(ArchsEmulated, KeepTheContract) {
  const auto& [arch, pass, c] = GetParam();
  emulator::set_seed(std::hash<std::string>{}(c.name));
  check(c, {.device = {.kind = DeviceKind::emulator, .emulated_arch = arch}, .pass = pass});
}

std::string name_of_arch(const ::testing::TestParamInfo<ArchCase>& info) {
  const ArchCase& one = info.param;
  return "sm_" + std::to_string(one.arch) + (one.pass == Pass::forward ? "_forward_" : "_backward_") + one.c.name;
}

INSTANTIATE_TEST_SUITE_P(, ArchsEmulated, ::testing::ValuesIn(cases_of_archs()), name_of_arch);

}  // namespace
}  // namespace flash_attention::testing
