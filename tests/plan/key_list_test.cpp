// What lists of keys need of a workspace: as much as the lists and the rows, never queries times keys.
#include <gtest/gtest.h>

#include "flash_attention/plan.h"
#include "flash_attention/runtime.h"

namespace flash_attention::testing {
namespace {

Problem listed(std::int64_t tokens, KeyListKind kind, std::int64_t block_q, std::int64_t block_kv) {
  Problem p{.seq_q = tokens, .seq_kv = tokens, .heads_q = 16, .heads_kv = 2, .head_dim = 128, .dtype = Dtype::bfloat16};
  p.key_list = {.kind = kind, .entries = 16, .heads = 2, .block_q = block_q, .block_kv = block_kv};
  p.causal = true;
  return p;
}

TEST(KeyListPlan, WorkspaceIsOfListsAndRows) {
  struct Lists {
    KeyListKind kind;
    std::int64_t block_q, block_kv;
  };
  for (const Lists& lists : {Lists{KeyListKind::keys, 1, 1}, Lists{KeyListKind::blocks, 1, 16},
                             Lists{KeyListKind::blocks, 1, 128}, Lists{KeyListKind::blocks, 64, 64}}) {
    for (const int arch : {75, 80, 90}) {
      for (const Pass pass : {Pass::forward, Pass::backward}) {
        for (const std::int64_t tokens : {std::int64_t{1} << 14, std::int64_t{1} << 17}) {
          const Problem p = listed(tokens, lists.kind, lists.block_q, lists.block_kv);
          const auto workspace = static_cast<double>(make_plan(p, pass, typical_gpu(arch)).workspace_bytes);
          const auto rows = static_cast<double>(p.heads_q * tokens),
                     entries = rows / 8 * 16 / static_cast<double>(lists.block_q);
          // Backward sums dQ in float32 (dense calls do so, too); a mask of blocks has at most the bytes of Q.
          const double allowed = 3 * 4 * entries + rows * (16 + 128 * (pass == Pass::backward ? 8 : 2)) + (64 << 20);
          EXPECT_LE(workspace, allowed) << to_string(p) << " on sm_" << arch << ": " << workspace / (1 << 20) << " MiB";
        }
      }
    }
  }
}

}  // namespace
}  // namespace flash_attention::testing
