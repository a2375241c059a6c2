// What is refused about lists of keys, by name.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>

#include "api/checks/validate.h"
#include "flash_attention/error.h"

namespace flash_attention::testing {
namespace {

Problem with_list() {
  return {.batch = 2, .seq_q = 40, .seq_kv = 50, .heads_q = 8, .heads_kv = 2, .head_dim = 16,
          .key_list = {.kind = KeyListKind::keys, .entries = 9}};
}

void expect_refusal(const char* argument, const std::function<void(Problem&)>& change, Pass pass = Pass::forward) {
  Problem p = with_list();
  change(p);
  try {
    api::normalise(p, pass);
    ADD_FAILURE() << argument << " was not refused";
  } catch (const Error& error) {
    EXPECT_TRUE(std::string(error.what()).starts_with(argument)) << error.what();
  }
}

TEST(KeyListChecks, TakesWhatIsOne) {
  Problem p = with_list();
  EXPECT_NO_THROW(api::normalise(p, Pass::backward));
  p.key_list.heads = 2, p.key_list.entries = 1000;  // more than there are keys
  EXPECT_NO_THROW(api::normalise(p, Pass::backward));
  p.key_list = {.kind = KeyListKind::blocks, .entries = 3, .heads = 8, .block_q = 64, .block_kv = 1 << 30};
  EXPECT_EQ(api::normalise(p, Pass::forward).key_list.block_kv, 50);
  p.key_list = {.entries = 7, .heads = 3};  // off: the rest says nothing
  EXPECT_EQ(api::normalise(p, Pass::forward).key_list, KeyList{});
}

TEST(KeyListChecks, FlopsAreThoseOfListedKeys) {
  Problem p = with_list();
  EXPECT_EQ(flops(p, Pass::forward), 2.0 * (16 + 16) * 2 * 8 * 40 * 9);
  p.key_list = {.kind = KeyListKind::blocks, .entries = 3, .block_q = 8, .block_kv = 10};
  EXPECT_EQ(flops(p, Pass::forward), 2.0 * (16 + 16) * 2 * 8 * 40 * 30);
  p.key_list.entries = 100;  // no more than there are
  EXPECT_EQ(flops(p, Pass::forward), 2.0 * (16 + 16) * 2 * 8 * 40 * 50);
}

TEST(KeyListChecks, RefusesWhatIsNone) {
  expect_refusal("key_list.heads", [](Problem& p) { p.key_list.heads = 8; });  // of keys: not by query head
  expect_refusal("key_list.heads", [](Problem& p) { p.key_list.heads = 0; });
  expect_refusal("key_list.heads", [](Problem& p) { p.key_list.kind = KeyListKind::blocks, p.key_list.heads = 3; });
  expect_refusal("key_list.entries", [](Problem& p) { p.key_list.entries = -1; });
  expect_refusal("key_list.block_q", [](Problem& p) { p.key_list.block_q = 4; });
  expect_refusal("key_list.block_kv", [](Problem& p) { p.key_list.kind = KeyListKind::blocks, p.key_list.block_kv = 0; });
  expect_refusal("key_list.block_q", [](Problem& p) {
    p.packed = true, p.total_q = 80, p.total_kv = 100;
    p.key_list.kind = KeyListKind::blocks, p.key_list.block_q = 4;
  });
}

TEST(KeyListChecks, RefusesWhatItIsNotCombinedWith) {
  expect_refusal("key_indices", [](Problem& p) { p.hidden_rows.bounds = 1; });
  expect_refusal("key_indices", [](Problem& p) { p.block_mask = {64, 64, 0, 0, 1}; });
  expect_refusal("key_indices", [](Problem& p) { p.program = "v = ge i j\nvisible = v"; });
  expect_refusal("key_indices", [](Problem& p) { p.kv_dtype = Dtype::float8_e4m3; });
  expect_refusal("key_blocks", [](Problem& p) { p.key_list.kind = KeyListKind::blocks, p.invariant = true; });
  expect_refusal("key_indices", [](Problem&) {}, Pass::standard_forward);
}

/// Kernels of lists of blocks differ in whether they have the largest score at hand, so none is asked for it.
TEST(KeyListChecks, LargestScoresAreThoseOfLists) {
  Problem p{.seq_q = 4, .seq_kv = 4, .head_dim = 8};
  p.key_list = {.kind = KeyListKind::blocks, .entries = 1, .block_q = 4, .block_kv = 4};
  float tensor[4 * 8] = {}, out[4 * 8], row_max[4];
  const std::int32_t list[1] = {0};
  Buffers buffers{.q = tensor, .k = tensor, .v = tensor, .out = out};
  buffers.key_list = list, buffers.row_max = row_max;
  try {
    forward(p, buffers, {.device = {.kind = DeviceKind::cpu}});
    ADD_FAILURE() << "row_max was not refused";
  } catch (const Error& error) {
    EXPECT_TRUE(std::string(error.what()).starts_with("row_max")) << error.what();
  }
  const std::int32_t keys[4] = {3, 2, -1, 0};
  p.key_list = {.kind = KeyListKind::keys, .entries = 1};
  buffers.key_list = keys;
  forward(p, buffers, {.device = {.kind = DeviceKind::cpu}});
  EXPECT_EQ(row_max[0], 0);
  EXPECT_EQ(row_max[2], -INFINITY);
}

}  // namespace
}  // namespace flash_attention::testing
