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

TEST(Invariant, GpuCaches) {
  REQUIRE_GPU(80);
  for (const Dtype codes : {Dtype::float8_e4m3, Dtype::int8, Dtype::bfloat16}) {
    Problem p = invariant_problem(Dtype::bfloat16);
    p.kv_dtype = codes, p.kv_scales = codes == Dtype::int8 ? ScaleKind::token : ScaleKind::none;
    expect_invariant(p, 3000, {.kind = DeviceKind::cuda});
    p.heads_q = 16, p.heads_kv = 1, p.latent = true, p.head_dim = 576, p.head_dim_v = 512;
    expect_invariant(p, 1500, {.kind = DeviceKind::cuda});
  }
}

}  // namespace
}  // namespace flash_attention::testing
