#include <gtest/gtest.h>

#include <functional>

#include "api/backends.h"
#include "api/checks/validate.h"
#include "flash_attention/tune.h"
#include "support/gpu.h"
#include "tuning/tuner.h"

namespace flash_attention::tuning {
namespace {

Problem of(Dtype dtype, std::int64_t head_dim) {
  Problem p{.batch = 2, .seq_q = 611, .seq_kv = 1237, .heads_q = 8, .heads_kv = 4, .head_dim = head_dim};
  p.dtype = dtype;
  p.causal = true;
  return p;
}

/// Every choice of every problem computes the same, whatever the options, and times are those of a GPU.
TEST(TunerOnGpu, all_choices_agree) {
  REQUIRE_GPU(80);
  const Device device{.kind = DeviceKind::cuda};
  const DeviceInfo info = device_info(device);
  const Backend& backend = api::backend_of(device);
  const std::vector<std::pair<Pass, std::function<void(Problem&)>>> calls{
      {Pass::forward, [](Problem&) {}},
      {Pass::backward, [](Problem&) {}},
      {Pass::forward, [](Problem& p) { p.softcap = 20, p.alibi = true; }},
      {Pass::backward, [](Problem& p) { p.dropout_p = 0.25f; }},
      {Pass::forward, [](Problem& p) { p.packed = true, p.total_q = 900, p.total_kv = 2000; }},
      {Pass::backward, [](Problem& p) { p.packed = true, p.total_q = 900, p.total_kv = 2000; }},
      {Pass::forward, [](Problem& p) { p.seq_q = 1, p.seqused_kv = true; }},
      {Pass::forward, [](Problem& p) { p.seq_q = 3, p.seqused_kv = true, p.page_size = 64, p.num_pages = 50; }},
      {Pass::forward, [](Problem& p) { p.seq_q = 1, p.seqused_kv = true, p.kv_dtype = Dtype::float8_e4m3; }},
  };
  for (const std::int64_t head_dim : {64, 128}) {
    for (const auto& [pass, change] : calls) {
      Problem problem = of(Dtype::bfloat16, head_dim);
      change(problem);
      const Call call{api::normalise(problem, pass), pass, api::normalise(problem, Pass::forward)};
      const TunedCase tuned = tune_case(call, info, backend, tools_of(info, backend), 0.05, {});
      EXPECT_EQ(tuned.result.skipped, "") << to_string(problem);
      EXPECT_TRUE(tuned.decided);
      EXPECT_EQ(tuned.result.dropped, std::vector<std::string>{}) << to_string(problem);
      EXPECT_GT(tuned.result.usual_seconds, 1e-6);
      EXPECT_LT(tuned.result.usual_seconds, 1e-2);
    }
  }
}

}  // namespace
}  // namespace flash_attention::tuning
