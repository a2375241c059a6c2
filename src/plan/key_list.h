#pragma once

#include <cstdint>

#include "flash_attention/problem.h"

namespace flash_attention::plan {

/// Lists of a sequence and head.
constexpr std::int64_t list_rows(const Problem& p) {
  return (p.seq_q + p.key_list.block_q - 1) / p.key_list.block_q;
}

/// Blocks of keys of a sequence.
constexpr std::int64_t list_key_units(const Problem& p) {
  return (p.seq_kv + p.key_list.block_kv - 1) / p.key_list.block_kv;
}

/// Whether each query head has its own lists although heads share keys.
constexpr bool lists_by_query_head(const Problem& p) {
  return p.key_list.heads == p.heads_q && p.heads_q != p.heads_kv;
}

/// Heads whose rows share no list, or no keys, with those of others; and the number of query heads of each.
constexpr std::int64_t list_units(const Problem& p) { return lists_by_query_head(p) ? p.heads_q : p.heads_kv; }
constexpr std::int64_t stacked_heads(const Problem& p) { return p.heads_q / list_units(p); }

/// The same problem with its lists of blocks as a block mask, [batch, 1 or heads_q, rows of lists, blocks of keys]
/// dense.
Problem with_block_mask(const Problem& problem);

/// Bytes of that mask.
std::int64_t block_mask_bytes(const Problem& problem);

}  // namespace flash_attention::plan
