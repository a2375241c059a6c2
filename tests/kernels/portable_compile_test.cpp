#include <gtest/gtest.h>

#include "support/compile.h"
#include "support/long_tail.h"

namespace flash_attention::testing {
namespace {

struct Variant {
  const char* name;
  Pass pass;
  const char* kernel;
  int allowed_spill_bytes = 0;
};
const Variant variants[] = {{"forward", Pass::forward, "forward/portable"},
                            {"backward", Pass::backward, "backward/portable"},
                            {"tangent", Pass::tangent, "tangent/portable", 128},
                            {"second", Pass::second, "second/portable", 128},
                            {"standard_forward", Pass::standard_forward, "standard/forward"},
                            {"standard_backward", Pass::standard_backward, "standard/backward"}};

/// A wide head (at 256 the key gradients spill one register, which costs these kernels nothing), and every option at once.
/// Outside of the long tail a wide head of backward alone, which needs most registers. With tangents every option at once
/// takes a few registers more than there are: 56 to 112 bytes of spills.
std::vector<Problem> problems() {
  Problem wide{.batch = 1, .seq_q = 256, .seq_kv = 256, .heads_q = 2, .heads_kv = 2, .head_dim = 192};
  Problem everything{.batch = 2, .seq_q = 256, .seq_kv = 256, .heads_q = 4, .heads_kv = 2, .head_dim = 128};
  everything.head_dim_v = 72;
  everything.dtype = Dtype::float16;
  everything.softcap = 30;
  everything.bias = {.present = true, .dtype = Dtype::float16, .q_stride = 256};
  everything.mask = {.present = true, .q_stride = 256};
  everything.alibi = everything.key_lengths = everything.seqused_q = everything.seqused_kv = everything.sink = true;
  everything.packed = true, everything.total_q = everything.total_kv = 500;
  everything.window_left = 100;
  everything.window_right = 3;
  everything.dropout_p = 0.1f;
  return {wide, everything};
}

using PortableCompile = ::testing::TestWithParam<Variant>;

TEST_P(PortableCompile, NoSpill) {
  if (const std::string reason = why_no_compiler(); !reason.empty()) GTEST_SKIP() << reason;
  for (const int arch : {80, 90}) {
    if (arch == 90 && !with_long_tail()) continue;  // nothing in these kernels depends on it
    const DeviceInfo device{
        .device = {.kind = DeviceKind::cuda}, .arch = arch, .num_sms = 108, .shared_bytes = shared_limit(arch)};
    std::vector<Plan> plans;
    for (const Problem& problem : problems()) {
      if (problem.head_dim == 192 && GetParam().pass != Pass::backward && !with_long_tail()) continue;
      plans.push_back(make_plan(problem, GetParam().pass, device, GetParam().kernel));
    }
    expect_plans_compile(plans, arch, GetParam().allowed_spill_bytes);
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, PortableCompile, ::testing::ValuesIn(variants),
                         [](const ::testing::TestParamInfo<Variant>& variant) { return std::string(variant.param.name); });

}  // namespace
}  // namespace flash_attention::testing
