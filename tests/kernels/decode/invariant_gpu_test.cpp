// Invariant bits on this machine's GPU.
#include <gtest/gtest.h>

#include "support/gpu.h"
#include "support/invariant.h"

namespace flash_attention::testing {
namespace {

TEST(Invariant, Gpu) {
  REQUIRE_GPU(70);
  for (const Dtype dtype : {Dtype::bfloat16, Dtype::float16, Dtype::float32}) {
    Problem p = invariant_problem(dtype);
    expect_invariant(p, 3000, {.kind = DeviceKind::cuda});
    p.window_left = 700, p.sink = true;
    expect_invariant(p, 2222, {.kind = DeviceKind::cuda});
    p.head_dim = p.head_dim_v = 128, p.heads_q = 16;
    expect_invariant(p, 5000, {.kind = DeviceKind::cuda});
  }
}

}  // namespace
}  // namespace flash_attention::testing
