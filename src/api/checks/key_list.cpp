#include "api/checks/key_list.h"

#include <algorithm>
#include <string>

#include "api/checks/refuse.h"
#include "api/checks/sizes.h"

namespace flash_attention::api {
namespace {

/// The first option that lists of keys do not support yet.
const char* other_option(const Problem& p) {
  if (p.hidden_rows.bounds != 0) return "hidden_rows";
  if (p.block_mask.block_q != 0) return "block_mask";
  if (!p.program.empty()) return "programs";
  if (*p.kv_dtype != p.dtype) return has_groups(*p.kv_dtype) ? "keys of 4 bits" : "keys of 8 bits";
  if (p.invariant) return "invariant";
  return nullptr;
}

}  // namespace

void check_key_list(Problem& p, Pass pass) {
  KeyList& list = p.key_list;
  require(list.kind <= KeyListKind::blocks, "key_list.kind", static_cast<std::int64_t>(list.kind),
          "allowed are none, keys and blocks");
  if (list.kind == KeyListKind::none) {
    list = {};
    return;
  }
  const bool blocks = list.kind == KeyListKind::blocks;
  const std::string name = blocks ? "key_blocks" : "key_indices";
  const std::string got = "lists of " + std::string(to_string(list.kind));
  if (pass == Pass::standard_forward || pass == Pass::standard_backward) {
    refuse(name, got, "the textbook algorithm takes none");
  }
  if (pass == Pass::tangent || pass == Pass::second) refuse(name, got, "they have no tangents and no second derivatives");
  check_size("key_list.entries", list.entries, 0);
  check_size("key_list.block_q", list.block_q, 1);
  check_size("key_list.block_kv", list.block_kv, 1);
  require(blocks || list.block_q == 1, "key_list.block_q", list.block_q, "allowed is 1 for lists of keys");
  require(blocks || list.block_kv == 1, "key_list.block_kv", list.block_kv, "allowed is 1 for lists of keys");
  require(!p.packed || list.block_q == 1, "key_list.block_q", list.block_q, "allowed is 1 in a packed problem");
  if (list.heads != 1 && list.heads != p.heads_kv && !(blocks && list.heads == p.heads_q)) {
    refuse("key_list.heads", std::to_string(list.heads),
           "allowed are 1 and heads_kv, " + std::to_string(p.heads_kv) +
               (blocks ? ", and heads_q, " + std::to_string(p.heads_q) : ""));
  }
  list.block_q = std::min(list.block_q, std::max<std::int64_t>(p.seq_q, 1));  // one block is as good as a larger one
  list.block_kv = std::min(list.block_kv, std::max<std::int64_t>(p.seq_kv, 1));
  const std::int64_t lists = p.packed ? p.total_q : p.batch * ((p.seq_q + list.block_q - 1) / list.block_q);
  check_size("lists of key_list", lists * list.heads, 0);
  check_reach("key_list.entries", list.entries, lists * list.heads);
  if (const char* other = other_option(p)) refuse(name, got, "it is not combined with " + std::string(other) + " yet");
}

}  // namespace flash_attention::api
