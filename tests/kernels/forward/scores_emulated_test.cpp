// Scores that hurt, every forward kernel in the emulator: so large that their rounding errors are exponents; next to
// nothing beside a soft cap.
#include "kernels/emulated.h"
#include "support/oracle/rounding.h"

namespace flash_attention::testing {
namespace {

struct ScoreTarget {
  const char* kernel;
  int arch;
  Dtype dtype;
  std::int64_t head_dim;
  std::int64_t seq_q = 67;
  bool masked = false;
};

using ForwardScores = ::testing::TestWithParam<ScoreTarget>;

/// Dot products are exact, and the few probabilities that are not 0 are all the same: no more is allowed than they and
/// out lose by being rounded.
TEST_P(ForwardScores, MayBeHuge) {
  const ScoreTarget& from = GetParam();
  emulator::set_num_sms(2);
  emulator::set_seed(5);
  for (const bool causal : {false, true}) {
    Case c = base("huge", from.dtype);
    c.draw = Draw::huge;
    Problem& p = c.problem;
    p.batch = 1, p.seq_q = from.seq_q, p.seq_kv = 450, p.head_dim = from.head_dim, p.causal = causal;
    if (from.masked) p.mask = over(p, false, false, true);
    const Target kernel{.device = {.kind = DeviceKind::emulator, .emulated_arch = from.arch}, .kernel = from.kernel};
    if (kernel.kernel == "forward/tf32") p.precision = Precision::fast;
    if (kernel.kernel == "forward/fp32") p.precision = Precision::ieee;
    if (kernel.kernel.ends_with("_fp8")) p.q_dtype = p.kv_dtype = Dtype::float8_e5m2;
    const Expected expected = expect(c, false);
    const Results got = attempt(c, kernel, expected).results;
    const Results& want = expected.want;
    const double rounding = 2 * epsilon(from.dtype);
    for (const std::string& line : differences("out", got.out, want.out, want.out, from.dtype, 1, rounding))
      ADD_FAILURE() << from.kernel << ": " << line;
    for (const std::string& line : differences("lse", got.lse, want.lse, want.lse, Dtype::float32))
      ADD_FAILURE() << from.kernel << ": " << line;
  }
  emulator::set_num_sms(0);
}

/// lse of a row with one key is its score, which tanh by exponentials would know to 1e-7 of the cap and no better.
TEST_P(ForwardScores, AreCappedNearZero) {
  const ScoreTarget& from = GetParam();
  if (std::string(from.kernel).ends_with("_fp8")) GTEST_SKIP() << "a narrow dot product is not that precise";
  Case c = base("capped", from.dtype);
  Problem& p = c.problem;
  p.seq_q = from.seq_q, p.seq_kv = 1, p.heads_q = p.heads_kv = 4, p.head_dim = from.head_dim, p.softcap = 100;
  if (from.kernel == std::string("forward/tf32")) p.precision = Precision::fast;
  if (from.kernel == std::string("forward/fp32")) p.precision = Precision::ieee;
  check(c, {.device = {.kind = DeviceKind::emulator, .emulated_arch = from.arch}, .kernel = from.kernel});
}

INSTANTIATE_TEST_SUITE_P(Kernels, ForwardScores,
                         ::testing::Values(ScoreTarget{"forward/portable", 90, Dtype::float32, 64},
                                           ScoreTarget{"forward/portable", 90, Dtype::float16, 64},
                                           ScoreTarget{"forward/tf32", 80, Dtype::float32, 64},
                                           ScoreTarget{"forward/fp32", 80, Dtype::float32, 64},
                                           ScoreTarget{"forward/sm80", 80, Dtype::bfloat16, 64},
                                           ScoreTarget{"forward/sm80", 80, Dtype::float16, 128},
                                           ScoreTarget{"forward/sm90", 90, Dtype::bfloat16, 64},
                                           ScoreTarget{"forward/sm90", 90, Dtype::float16, 128},
                                           ScoreTarget{"forward/sm90", 90, Dtype::bfloat16, 256},
                                           ScoreTarget{"forward/sm90", 90, Dtype::bfloat16, 512},
                                           ScoreTarget{"forward/sm90", 90, Dtype::bfloat16, 128, 200, true},
                                           ScoreTarget{"forward/sm90_fp8", 90, Dtype::bfloat16, 128},
                                           ScoreTarget{"forward/sm89_fp8", 89, Dtype::bfloat16, 128},
                                           ScoreTarget{"decode/sm80", 80, Dtype::bfloat16, 64, 3},
                                           ScoreTarget{"decode/sm90", 90, Dtype::float16, 128, 3}));

}  // namespace
}  // namespace flash_attention::testing
