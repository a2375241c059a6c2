// backward/sm90 with head dimensions above 256, in the emulator: two warpgroups with half of the columns each.
#include "kernels/emulated.h"

namespace flash_attention::testing {
namespace {

using BackwardSm90Columns = ::testing::TestWithParam<Case>;

TEST_P(BackwardSm90Columns, KeepTheContract) { check_sm90(GetParam(), "backward/sm90", Pass::backward, 2); }

/// One sequence, bfloat16.
Case columns(const char* name, std::int64_t dim, std::int64_t dim_v, std::int64_t seq_q, std::int64_t seq_kv,
             void (*change)(Case&, Problem&)) {
  Case c = base(name, Dtype::bfloat16);
  c.problem.batch = c.problem.heads_q = c.problem.heads_kv = 1;
  c.problem.head_dim = dim, c.problem.head_dim_v = dim_v, c.problem.seq_q = seq_q, c.problem.seq_kv = seq_kv;
  change(c, c.problem);
  return c;
}

/// Few configurations, since each is compiled three times: odd and even numbers of steps, tasks without any, groups of
/// heads; NaN where some rows do not see it.
std::vector<Case> column_loops() {
  return {
      columns("columns_causal", 512, 512, 200, 330, [](Case&, Problem& p) { p.causal = true, p.heads_q = 2; }),
      columns("columns_empty_rows", 512, 512, 330, 70, [](Case&, Problem& p) { p.causal = true; }),
      columns("columns_nan_key", 512, 512, 130, 200, [](Case& c, Problem& p) { p.causal = true, c.nan_key = 130; }),
      columns("columns_nan_value", 512, 512, 130, 200, [](Case& c, Problem& p) { p.causal = true, c.nan_value = 130; }),
      columns("columns_nan_query", 512, 512, 130, 200, [](Case& c, Problem& p) { p.causal = true, c.nan_query = 5; }),
      columns("columns_nan_dout", 512, 512, 130, 200, [](Case& c, Problem& p) { p.causal = true, c.nan_dout = 5; }),
      columns("columns_options", 320, 64, 130, 190,
              [](Case& c, Problem& p) {
                p.dtype = Dtype::float16, p.softcap = 5, p.window_left = 100, p.window_right = 3, p.dropout_p = 0.2f;
                p.sink = c.dsink = c.dlse = true;
              }),
      columns("columns_bias_alibi", 264, 512, 70, 130,
              [](Case& c, Problem& p) { p.alibi = true, p.bias = over(p, true, true, true), c.dbias = true; }),
      columns("columns_packed", 64, 264, 0, 0,
              [](Case& c, Problem& p) {
                pack(c, {70, 0, 65, 130}, {100, 9, 0, 190}), p.causal = true;
              }),
  };
}

INSTANTIATE_TEST_SUITE_P(Loops, BackwardSm90Columns, ::testing::ValuesIn(column_loops()), case_name);

}  // namespace
}  // namespace flash_attention::testing
