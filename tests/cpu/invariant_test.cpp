// Invariant bits on the CPU: prefill and decoding, batches, pages, capacities.
#include "support/invariant.h"

#include <gtest/gtest.h>

namespace flash_attention::testing {
namespace {

TEST(Invariant, Cpu) {
  for (const Dtype dtype : {Dtype::float32, Dtype::float16, Dtype::bfloat16}) {
    Problem p = invariant_problem(dtype);
    expect_invariant(p, 1100, {});
    expect_invariant(p, 60, {});  // one tile
    p.window_left = 130, p.sink = true, p.softcap = 9;
    expect_invariant(p, 515, {});
    p.heads_q = 48, p.head_dim = p.head_dim_v = 24;
    expect_invariant(p, 200, {});
  }
}

TEST(Invariant, CpuCaches) {
  for (const Dtype dtype : {Dtype::float32, Dtype::bfloat16}) {
    Problem p = invariant_problem(dtype);
    p.kv_dtype = Dtype::float8_e4m3, p.kv_scales = ScaleKind::token;
    expect_invariant(p, 700, {});
    p.kv_dtype = Dtype::int8, p.kv_scales = ScaleKind::head, p.window_left = 90;
    expect_invariant(p, 240, {});
    Problem latent = invariant_problem(dtype);
    latent.heads_kv = 1, latent.latent = true, latent.head_dim = 96;
    expect_invariant(latent, 650, {});
    latent.kv_dtype = Dtype::float8_e5m2;
    expect_invariant(latent, 130, {});
  }
}

/// The check can fail: without the flag bits differ.
TEST(Invariant, IsNotThereUnasked) {
  Problem p = invariant_problem(Dtype::bfloat16);
  p.invariant = false;
  const RowBits prefill = rows_of(p, {.name = "prefill", .parts = {{0, 1100, 21}}}, {});
  const RowBits decode = rows_of(p, {.name = "decode", .parts = {{0, 1100, 1}}}, {});
  bool differs = false;
  for (const auto& [row, bits] : decode) {
    for (const auto& [other, other_bits] : prefill) differs = differs || (row == other && bits != other_bits);
  }
  EXPECT_TRUE(differs);
}

}  // namespace
}  // namespace flash_attention::testing
