#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "flash_attention/c_api.h"

namespace flash_attention::testing {
namespace {

TEST(CAppend, WritesTheNewRowsTurned) {
  flash_attention_append_problem problem;
  flash_attention_append_buffers buffers;
  flash_attention_options options;
  flash_attention_append_problem_init(&problem);
  flash_attention_append_buffers_init(&buffers);
  flash_attention_options_init(&options);
  problem.seq_new = 1, problem.head_dim = 4, problem.capacity = 3, problem.rotary_dim = 2, problem.rotary_positions = 2;
  const float k[4] = {1, 2, 3, 4}, v[4] = {5, 6, 7, 8}, cos[2] = {1, 0}, sin[2] = {0, 1};
  float k_cache[12] = {}, v_cache[12] = {};
  std::int32_t length = 1;
  buffers.k = k, buffers.v = v, buffers.k_cache = k_cache, buffers.v_cache = v_cache, buffers.cos = cos, buffers.sin = sin;
  buffers.lengths = &length;
  ASSERT_EQ(flash_attention_append(&problem, &buffers, &options), FLASH_ATTENTION_OK) << flash_attention_last_error();
  const float want_k[12] = {0, 0, 0, 0, -2, 1, 3, 4}, want_v[12] = {0, 0, 0, 0, 5, 6, 7, 8};
  EXPECT_TRUE(std::equal(k_cache, k_cache + 12, want_k) && std::equal(v_cache, v_cache + 12, want_v));

  const auto refused = [&](const char* words) {
    EXPECT_EQ(flash_attention_append(&problem, &buffers, &options), FLASH_ATTENTION_INVALID_ARGUMENT);
    EXPECT_NE(std::string(flash_attention_last_error()).find(words), std::string::npos) << flash_attention_last_error();
  };
  length = 3, refused("lengths[0]: got 3; with 1 new rows; the cache has room for 3");
  length = 2, refused("lengths[0]: got 2; cos and sin have 2 positions, and 2 is needed");
  length = 1, problem.rotary_dim = 3, refused("rotary_dim: got 3; allowed are 0 and even numbers up to head_dim, 4");
  problem.rotary_dim = 2, problem.scales = FLASH_ATTENTION_HEAD_SCALES, refused("scales: got head");
  problem.scales = 9, refused("scales: got 9");
  problem.scales = 0, problem.cache_dtype = 9, refused("cache_dtype: got 9");
  problem.cache_dtype = -1, buffers.sin = nullptr, refused("sin: got null");
  problem.size += 8, refused("problem->size");
}

TEST(CAppend, NormsRowsAndGivesTheirGradients) {
  flash_attention_append_problem problem;
  flash_attention_append_buffers buffers;
  flash_attention_append_gradients gradients;
  flash_attention_append_problem_init(&problem);
  flash_attention_append_buffers_init(&buffers);
  flash_attention_append_gradients_init(&gradients);
  flash_attention_options options;
  flash_attention_options_init(&options);
  problem.seq_new = problem.seq_q = 1, problem.head_dim = 2, problem.q_norm = 1, problem.in_rows = 1, problem.norm_eps = 0;
  const float q[2] = {1, 7}, k[2] = {3, 4}, weight[2] = {10, 20}, dq_out[2] = {1, 0}, dk_out[2] = {5, 6};
  float q_out[2], k_out[2], dq[2], dk[2], dweight[2];
  buffers.q = q, buffers.q_out = q_out, buffers.k = k, buffers.k_cache = k_out, buffers.q_norm_weight = weight;
  ASSERT_EQ(flash_attention_append(&problem, &buffers, &options), FLASH_ATTENTION_OK) << flash_attention_last_error();
  EXPECT_FLOAT_EQ(q_out[0], 2);
  EXPECT_FLOAT_EQ(q_out[1], 28);  // the root mean square is 5
  EXPECT_TRUE(std::equal(k, k + 2, k_out));

  std::size_t bytes = 0;
  ASSERT_EQ(flash_attention_append_backward_workspace(&problem, &bytes), FLASH_ATTENTION_OK);
  std::vector<unsigned char> workspace(bytes);
  gradients.dq_out = dq_out, gradients.dk_out = dk_out, gradients.dq = dq, gradients.dk = dk;
  gradients.dq_norm_weight = dweight, gradients.workspace = workspace.data();
  ASSERT_EQ(flash_attention_append_backward(&problem, &buffers, &gradients, &options), FLASH_ATTENTION_OK)
      << flash_attention_last_error();
  // q_out[0] = 10 x / r, r^2 = (x^2 + y^2) / 2: its derivatives are 10 (1 / r - x^2 / (2 r^3)) and -10 x y / (2 r^3).
  EXPECT_FLOAT_EQ(dq[0], 1.96f);
  EXPECT_FLOAT_EQ(dq[1], -0.28f);
  EXPECT_FLOAT_EQ(dweight[0], 0.2f);
  EXPECT_FLOAT_EQ(dweight[1], 0);
  EXPECT_TRUE(std::equal(dk_out, dk_out + 2, dk));

  const auto refused = [&](const char* words) {
    EXPECT_EQ(flash_attention_append_backward(&problem, &buffers, &gradients, &options), FLASH_ATTENTION_INVALID_ARGUMENT);
    EXPECT_NE(std::string(flash_attention_last_error()).find(words), std::string::npos) << flash_attention_last_error();
  };
  gradients.dk_norm_weight = dweight, refused("dk_norm_weight");
  gradients.dk_norm_weight = nullptr, gradients.dq = const_cast<float*>(q), refused("dq");
  gradients.dq = dq, problem.in_rows = 0, problem.capacity = 1, refused("in_rows");
}

}  // namespace
}  // namespace flash_attention::testing
