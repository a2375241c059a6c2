// Configurations that the planner gives forward/sm90_fp8 compile, spill nothing, and no wgmma is serialised.
#include "kernels/sm90_compile.h"
#include "support/long_tail.h"

namespace flash_attention::testing {
namespace {

TEST(ForwardSm90Fp8Compiles, TilesAndOptions) {
  if (const std::string reason = why_no_compiler(); !reason.empty()) GTEST_SKIP() << reason;
  std::vector<Plan> plans;
  const auto add = [&](Problem p, Dtype codes = Dtype::float8_e4m3) {
    p.q_dtype = p.kv_dtype = codes;
    p.q_scales = p.kv_scales = ScaleKind::head;
    plans.push_back(make_plan(p, Pass::forward, h200(), "forward/sm90_fp8"));
  };
  add(problem(128));
  if (with_long_tail()) {
    add(problem(64));
    add(problem(256));
    add(problem(128, false));
    add(problem(128), Dtype::float8_e5m2);
  }
  Problem p = problem(128);
  if (with_long_tail()) {
    p.packed = true, p.total_q = p.total_kv = 2000;
    add(p);
    p = problem(128);
    p.softcap = 20, p.seqused_q = p.seqused_kv = true;
    add(p);
  }
  if (with_long_tail()) {
    p = problem(256, false);
    p.softcap = 20, p.window_left = 100, p.key_lengths = true;
    add(p);
  }
  p = problem(128);
  p.bias = {.present = true, .dtype = Dtype::bfloat16, .q_stride = p.seq_kv};
  add(p);
  if (with_long_tail()) {
    p = problem(256);
    p.bias = {.present = true, .dtype = Dtype::bfloat16, .q_stride = p.seq_kv};
    add(p);
    p = problem(128);
    p.page_size = 16, p.num_pages = 1000, p.page_table_stride = 128, p.seqused_kv = true, p.seq_kv = 2048;
    add(p);
  }
  p = problem(128);
  p.seq_q = p.seq_kv = 4000, p.batch = 8;  // V of later heads is transposed under tiles
  add(p);
  expect_plans_compile(plans, 90);
  // The same in tiles of 192 x 96: four bytes of the warps that transpose.
  plans.clear();
  p.seq_q = p.seq_kv = 2000;
  add(p);
  expect_plans_compile(plans, 90, 12);

  // Packed sequences with a window: eight registers, as many with tiles of 64 keys as with 128, so they are not the
  // products'.
  plans.clear();
  p = problem(128);
  p.packed = true, p.total_q = p.total_kv = 2000, p.window_left = 100;
  add(p);
  expect_plans_compile(plans, 90, 52);
}

}  // namespace
}  // namespace flash_attention::testing
