#include "plan/key_list.h"

namespace flash_attention::plan {
namespace {

std::int64_t mask_heads(const Problem& p) { return p.key_list.heads == 1 ? 1 : p.heads_q; }

}  // namespace

Problem with_block_mask(const Problem& problem) {
  Problem masked = problem;
  const std::int64_t units = list_key_units(problem), of_head = list_rows(problem) * units;
  masked.key_list = {};
  masked.block_mask = {.block_q = problem.key_list.block_q,
                       .block_kv = problem.key_list.block_kv,
                       .batch_stride = mask_heads(problem) * of_head,
                       .head_stride = mask_heads(problem) > 1 ? of_head : 0,
                       .q_stride = units};
  return masked;
}

std::int64_t block_mask_bytes(const Problem& p) { return p.batch * mask_heads(p) * list_rows(p) * list_key_units(p); }

}  // namespace flash_attention::plan
