// Dropout near 1: what is kept may be far below a row's largest probability, and is scaled up. Each row is compared on its
// own, because the rows that keep their largest probability would hide the others.
#include <algorithm>
#include <cmath>

#include "emulator/host/seed.h"
#include "flash_attention/attention.h"
#include "support/cases/contract.h"
#include "support/oracle/oracle.h"
#include "support/oracle/tensors.h"

namespace flash_attention::testing {
namespace {

void check_rows(const char* kernel, float dropout_p) {
  const Device device{.kind = DeviceKind::emulator, .emulated_arch = 90};
  Case c;
  c.name = kernel;
  c.problem = {
      .batch = 1, .seq_q = 70, .seq_kv = 300, .heads_q = 2, .heads_kv = 2, .head_dim = 64, .dtype = Dtype::float16};
  c.problem.dropout_p = dropout_p;
  c.problem.scale = 0.375f;  // scores of size 3: most keys are e^-9 below the largest
  const Inputs in = draw_inputs(c);
  const Results want = oracle(c, in, false);
  const auto memory = memory_of(device);
  Tensors tensors(c, in, *memory);
  emulator::set_seed(5);
  Buffers buffers = tensors.buffers();
  forward(c.problem, buffers, {.device = device, .seed = c.dropout_seed, .offset = c.dropout_offset, .kernel = kernel});
  const Results got = tensors.read(false);
  const std::size_t dim = 64;
  for (std::size_t row = 0; row < want.out.size() / dim; ++row) {
    double largest = 0, error = 0;
    for (std::size_t x = row * dim; x < (row + 1) * dim; ++x) {
      largest = std::max(largest, std::fabs(want.out[x]));
      error = std::max(error, std::fabs(got.out[x] - want.out[x]));
    }
    // Two roundings to float16 of numbers of that size, and one of an output that may be subnormal.
    EXPECT_LE(error, 0x1p-9 * largest + 0x1p-24) << kernel << ", dropout_p " << dropout_p << ", row " << row;
  }
}

TEST(DropoutNearOne, EveryRowIsExact) {
  for (const char* kernel : {"forward/sm80", "forward/sm90"}) {
    for (const float dropout_p : {0.9f, 0.99f, 0.999f}) check_rows(kernel, dropout_p);
  }
}

constexpr TileSize of_three_warpgroups{192, 64};

/// The tile of long sequences: blocks that one warpgroup sees and another does not, tiles that are done again with a
/// running maximum, tiles in which NaN must not reach other rows, both types, and rows without keys.
TEST(DropoutOfThreeWarpgroups, KeepsTheContract) {
  const Device device{.kind = DeviceKind::emulator, .emulated_arch = 90};
  const Target three{.device = device, .kernel = "forward/sm90", .pass = Pass::forward, .tile = of_three_warpgroups};
  emulator::set_num_sms(2);
  emulator::set_seed(7);
  Case c;
  const auto run = [&](const char* name) {
    c.name = name;
    check(c, three);
  };
  c.problem = {.batch = 1,
               .seq_q = 331,
               .seq_kv = 397,
               .heads_q = 2,
               .heads_kv = 1,
               .head_dim = 64,
               .dtype = Dtype::bfloat16,
               .causal = true};
  c.problem.dropout_p = 0.3f;
  run("causal");
  c.draw = Draw::growing;
  run("repeated");
  c.draw = Draw::normal, c.nan_value = 211;
  run("nan_value");
  c.nan_value = -1, c.nan_key = 390;
  run("nan_key");
  c.nan_key = -1, c.problem.dtype = Dtype::float16, c.problem.head_dim_v = 40;
  c.problem.seq_kv = 127;  // the first rows see no key
  run("empty_rows");
  c.problem.causal = false, c.problem.window_left = 70, c.problem.window_right = 5, c.problem.seq_kv = 331;
  c.problem.dropout_p = 0.9f;
  run("window");
}

}  // namespace
}  // namespace flash_attention::testing
