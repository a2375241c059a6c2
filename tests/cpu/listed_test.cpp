// Lists of keys on the CPU, on the best instruction set.
#include <gtest/gtest.h>

#include "support/cases/contract.h"

namespace flash_attention::testing {
namespace {

class CpuListed : public ::testing::TestWithParam<Case> {};

TEST_P(CpuListed, Forward) { check(GetParam(), {.kernel = "cpu/listed"}); }
TEST_P(CpuListed, Backward) { check(GetParam(), {.kernel = "cpu/listed", .pass = Pass::backward}); }

INSTANTIATE_TEST_SUITE_P(Float32, CpuListed, ::testing::ValuesIn(list_cases(Dtype::float32)), case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, CpuListed, ::testing::ValuesIn(some_of(list_cases(Dtype::bfloat16), 4)), case_name);

class CpuListedCache : public ::testing::TestWithParam<Case> {};

TEST_P(CpuListedCache, Forward) { check(GetParam(), {.kernel = "cpu/listed"}); }

INSTANTIATE_TEST_SUITE_P(Float16, CpuListedCache, ::testing::ValuesIn(some_of(list_cache_cases(Dtype::float16), 2)),
                         case_name);

/// A list of all keys, in any order, is the dense call.
TEST(CpuListedIdentity, IsTheDenseCall) {
  constexpr std::int64_t rows = 37, keys = 131, dim = 24;
  const auto draw = [](std::int64_t count, unsigned state) {
    std::vector<float> values(count);
    for (float& x : values) state = state * 1664525u + 1013904223u, x = static_cast<float>(state >> 8) * 0x1p-23f - 1;
    return values;
  };
  const std::vector<float> q = draw(rows * 4 * dim, 1), k = draw(keys * 2 * dim, 2), v = draw(keys * 2 * dim, 3);
  std::vector<float> dense(rows * 4 * dim), listed(dense.size()), dense_lse(rows * 4), listed_lse(rows * 4);
  Problem p{.seq_q = rows, .seq_kv = keys, .heads_q = 4, .heads_kv = 2, .head_dim = dim, .causal = true};
  forward(p, {.q = q.data(), .k = k.data(), .v = v.data(), .out = dense.data(), .lse = dense_lse.data()});
  p.key_list = {.kind = KeyListKind::keys, .entries = keys};
  std::vector<std::int32_t> list;
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < keys; ++j) list.push_back(static_cast<std::int32_t>((j * 29 + i) % keys));
  }
  forward(p, {.q = q.data(), .k = k.data(), .v = v.data(), .out = listed.data(), .lse = listed_lse.data(),
              .key_list = list.data()});
  for (std::size_t x = 0; x < dense.size(); ++x) EXPECT_NEAR(dense[x], listed[x], 2e-6) << x;
  for (std::size_t x = 0; x < dense_lse.size(); ++x) EXPECT_NEAR(dense_lse[x], listed_lse[x], 4e-6) << x;
}

}  // namespace
}  // namespace flash_attention::testing
