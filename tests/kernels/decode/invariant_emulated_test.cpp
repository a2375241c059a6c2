// Invariant bits in the emulator: prefill and decoding, batches, pages, capacities, numbers of SMs.
#include <gtest/gtest.h>

#include "support/invariant.h"
#include "support/long_tail.h"

namespace flash_attention::testing {
namespace {

const Device emulator_device{.kind = DeviceKind::emulator};

/// Three splits of 2048 keys, the last one short.
TEST(Invariant, Emulated) { expect_invariant(invariant_problem(Dtype::bfloat16), 4200, emulator_device); }

/// A window leaves splits out, and cuts the first; rows of one tile see other splits.
TEST(Invariant, EmulatedWindow) {
  Problem p = invariant_problem(Dtype::float16);
  p.head_dim_v = 72;  // splits of 1024 keys
  p.window_left = 1050, p.sink = true, p.softcap = 9;
  expect_invariant(p, 2075, emulator_device);
}

/// Values of two panels, wider than the keys. The window's are, too.
TEST(Invariant, EmulatedWideValues) {
  if (!with_long_tail()) GTEST_SKIP() << "long tail";
  Problem p = invariant_problem(Dtype::bfloat16);
  p.head_dim_v = 72;
  expect_invariant(p, 300, emulator_device);
}

/// Large scores: what rows of the same tile see besides must not touch a row by so much as the rounding of its maximum.
/// Many rows raise their reference after the first block: prefill repeats their tiles, decoding takes their blocks again.
TEST(Invariant, EmulatedLargeScores) {
  Problem p = invariant_problem(Dtype::bfloat16);
  p.scale = 9.0f, p.heads_q = 16;
  expect_invariant(p, 390, emulator_device);
  if (!with_long_tail()) return;
  p.dtype = Dtype::float16, p.softcap = 700;
  expect_invariant(p, 700, emulator_device);
}

/// Keys of 8 bits: the order is that of 16 bits, and codes are worth the same wherever they are.
TEST(Invariant, EmulatedNarrowKeys) {
  Problem p = invariant_problem(Dtype::bfloat16);
  p.kv_dtype = Dtype::float8_e4m3, p.kv_scales = ScaleKind::head;
  expect_invariant(p, 2130, emulator_device);
  p.kv_dtype = Dtype::int8, p.kv_scales = ScaleKind::token, p.window_left = 130;
  expect_invariant(p, 210, emulator_device);
}

/// Latent keys, in 16 and in 8 bits: forward/portable.
TEST(Invariant, EmulatedLatentKeys) {
  Problem p = invariant_problem(Dtype::bfloat16);
  p.heads_kv = 1, p.latent = true, p.head_dim = 96, p.head_dim_v = 64, p.window_left = 1100;
  expect_invariant(p, 1130, emulator_device);
  p.kv_dtype = Dtype::float8_e4m3, p.window_left = -1;
  expect_invariant(p, 140, emulator_device);
}

/// The net under the faster kernels.
TEST(Invariant, EmulatedPortable) {
  Problem p = invariant_problem(Dtype::float32);
  p.window_left = 70;
  expect_invariant(p, 150, emulator_device);
}

}  // namespace
}  // namespace flash_attention::testing
