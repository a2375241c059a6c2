// Invariant bits on this machine's GPU.
#include <gtest/gtest.h>

#include "support/gpu.h"
#include "support/invariant.h"

namespace flash_attention::testing {
namespace {

const Device gpu_device{.kind = DeviceKind::cuda};

/// Each test compiles the kernels of one configuration: its problems differ in sizes and numbers alone.
void expect_invariant_with_large_scores(Problem p) {
  REQUIRE_GPU(70);
  expect_invariant(p, 3000, gpu_device);
  p.scale = 9.0f;
  expect_invariant(p, 700, gpu_device);
}

TEST(Invariant, Gpu) { expect_invariant_with_large_scores(invariant_problem(Dtype::bfloat16)); }

TEST(Invariant, GpuFloat32) { expect_invariant_with_large_scores(invariant_problem(Dtype::float32)); }

TEST(Invariant, GpuWindow) {
  Problem p = invariant_problem(Dtype::float16);
  p.window_left = 700, p.sink = true;
  expect_invariant_with_large_scores(p);
}

TEST(Invariant, GpuManyHeads) {
  Problem p = invariant_problem(Dtype::bfloat16);
  p.head_dim = p.head_dim_v = 128, p.heads_q = 16;
  expect_invariant_with_large_scores(p);
}

TEST(Invariant, GpuCaches) {
  REQUIRE_GPU(80);
  for (const Dtype codes : {Dtype::float8_e4m3, Dtype::int8, Dtype::bfloat16}) {
    Problem p = invariant_problem(Dtype::bfloat16);
    p.kv_dtype = codes, p.kv_scales = codes == Dtype::int8 ? ScaleKind::token : ScaleKind::none;
    expect_invariant(p, 3000, gpu_device);
    p.heads_q = 16, p.heads_kv = 1, p.latent = true, p.head_dim = 576, p.head_dim_v = 512;
    expect_invariant(p, 1500, gpu_device);
  }
}

}  // namespace
}  // namespace flash_attention::testing
