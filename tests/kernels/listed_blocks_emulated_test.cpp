// Lists of blocks that become a block mask, in the kernels of tensor cores.
#include "kernels/emulated.h"

namespace flash_attention::testing {
namespace {

std::vector<Case> block_list_cases() {
  std::vector<Case> cases;
  const auto add = [&](const char* name, void (*change)(Case&, Problem&)) {
    Case c = base(name, Dtype::bfloat16);
    c.problem.batch = 1, c.problem.seq_q = 197, c.problem.seq_kv = 389;
    c.problem.key_list = {.kind = KeyListKind::blocks, .entries = 3, .block_q = 64, .block_kv = 64};
    change(c, c.problem);
    cases.push_back(std::move(c));
  };
  add("listed_blocks_shared", [](Case& c, Problem& p) { p.key_list.counts = true, c.dlse = true; });
  add("listed_blocks_by_query_head", [](Case&, Problem& p) {
    p.heads_q = 4, p.heads_kv = 2, p.key_list.heads = 4, p.key_list.entries = 9;  // more than there are blocks
  });
  add("listed_blocks_by_key_head", [](Case& c, Problem& p) {
    p.heads_q = 4, p.heads_kv = 2, p.key_list.heads = 2, p.causal = true, p.sink = c.dsink = true;
  });
  add("listed_blocks_of_queries", [](Case&, Problem& p) {
    p.batch = 2, p.key_list.block_q = 1, p.key_list.block_kv = 128, p.key_list.entries = 2;
  });
  add("listed_blocks_nan", [](Case& c, Problem& p) { c.nan_value = 70, p.key_list.block_kv = 16; });
  return cases;
}

using ListedBlocks = ::testing::TestWithParam<Case>;

void check_blocks(const Case& c, const char* kernel, int arch, Pass pass) {
  const DeviceInfo device = device_info({.kind = DeviceKind::emulator, .emulated_arch = arch});
  EXPECT_GE(make_plan(c.problem, pass, device, kernel).listed_blocks, 0);
  emulator::set_seed(std::hash<std::string>{}(c.name));
  check(c, {.device = {.kind = DeviceKind::emulator, .emulated_arch = arch}, .kernel = kernel, .pass = pass});
}

/// Larger blocks need no mask there: sm90_lists_emulated_test.cpp.
Case with_small_blocks(Case c) {
  c.problem.key_list.block_kv = std::min<std::int64_t>(c.problem.key_list.block_kv, 32);
  return c;
}

TEST_P(ListedBlocks, ForwardSm90) { check_blocks(with_small_blocks(GetParam()), "forward/sm90", 90, Pass::forward); }
TEST_P(ListedBlocks, BackwardSm90) { check_blocks(with_small_blocks(GetParam()), "backward/sm90", 90, Pass::backward); }
TEST_P(ListedBlocks, ForwardSm80) { check_blocks(GetParam(), "forward/sm80", 80, Pass::forward); }
TEST_P(ListedBlocks, BackwardSm80) { check_blocks(GetParam(), "backward/sm80", 80, Pass::backward); }

INSTANTIATE_TEST_SUITE_P(Bfloat16, ListedBlocks, ::testing::ValuesIn(block_list_cases()), case_name);

/// A mask that would be larger than Q is not made.
TEST(ListedBlocksPlan, ChoosesByMemory) {
  Problem p{.seq_q = 4096, .seq_kv = 4096, .heads_q = 8, .heads_kv = 8, .head_dim = 64, .dtype = Dtype::bfloat16};
  p.key_list = {.kind = KeyListKind::blocks, .entries = 4, .heads = 8, .block_q = 64, .block_kv = 64};
  EXPECT_EQ(make_plan(p, Pass::forward, typical_gpu(90)).kernel, "forward/sm90");
  EXPECT_EQ(make_plan(p, Pass::backward, typical_gpu(90)).kernel, "backward/sm90");
  EXPECT_EQ(make_plan(p, Pass::forward, typical_gpu(80)).kernel, "forward/sm80");
  p.key_list.block_q = 1, p.key_list.block_kv = 16;
  EXPECT_EQ(make_plan(p, Pass::forward, typical_gpu(90)).kernel, "decode/sm80");
}

}  // namespace
}  // namespace flash_attention::testing
