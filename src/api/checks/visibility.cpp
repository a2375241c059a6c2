#include "api/checks/visibility.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>

#include "api/checks/refuse.h"
#include "api/checks/sizes.h"
#include "program/lower/window.h"

namespace flash_attention::api {
namespace {

/// Whether both diagonals are the same: there are as many keys as queries.
bool has_one_diagonal(const Problem& p) { return !p.packed && !p.seqused_q && !p.seqused_kv && p.seq_q == p.seq_kv; }

bool one_query_at_the_end(const Problem& p) { return p.seq_q <= 1 && !p.packed && p.alignment == Alignment::bottom_right; }

/// A bound that no score of this problem can cross costs mask work for nothing.
void drop_idle_window(Problem& p) {
  if (p.window_left >= p.seq_q + p.seq_kv) p.window_left = -1;
  if (p.window_right >= p.seq_q + p.seq_kv) p.window_right = -1;
  if (one_query_at_the_end(p)) p.window_right = -1;
  p.causal = p.window_right == 0;
}

/// Keys of a query's chunk are less than a chunk away. So a chunk is a window, whose edges it moves; one query at the end
/// has no key after it. A chunk that holds all keys and queries hides nothing.
void make_chunk_a_window(Problem& p) {
  const bool lengths = p.packed || p.seqused_q || p.seqused_kv;
  const bool no_query_before_keys =
      !p.left_padding && (p.alignment == Alignment::top_left || (!lengths && p.seq_q <= p.seq_kv));
  if (no_query_before_keys && p.attention_chunk >= std::max(p.seq_q, p.seq_kv)) p.attention_chunk = 0;
  if (p.attention_chunk == 0) return;
  const auto within = [&](std::int64_t bound) {
    return bound < 0 ? p.attention_chunk - 1 : std::min(bound, p.attention_chunk - 1);
  };
  p.window_left = within(p.window_left);
  if (!one_query_at_the_end(p)) p.window_right = within(p.window_right);
  p.causal = p.window_right == 0;
}

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

void choose_window(Problem& p) {
  if (has_one_diagonal(p)) p.alignment = Alignment::bottom_right;
  drop_idle_window(p);
  make_chunk_a_window(p);
}

void take_window_of_program(Problem& p) {
  const bool windowed = p.window_left >= 0 || p.window_right >= 0 || p.attention_chunk != 0;
  const bool one_diagonal = has_one_diagonal(p);
  if (p.program.empty() || (windowed && !one_diagonal && p.alignment != Alignment::top_left)) return;
  const std::optional<program::WindowOfProgram> taken = program::take_window(p.program);
  if (!taken) return;
  const auto tighten = [](std::int64_t& bound, std::int64_t by) {
    if (by >= 0) bound = bound < 0 ? by : std::min(bound, by);
  };
  tighten(p.window_left, taken->left);
  tighten(p.window_right, taken->right);
  if (!one_diagonal) p.alignment = Alignment::top_left;
  p.program = taken->rest;
  drop_idle_window(p);
}

void check_bit_mask(Problem& p, Pass pass) {
  const bool forward = pass == Pass::forward, lists = p.key_list.kind != KeyListKind::none;
  require(forward || !p.sequence_windows, "sequence_windows", std::int64_t{1}, "only forward takes them");
  require(!lists || !p.sequence_windows, "sequence_windows", std::int64_t{1},
          "they are not combined with lists of keys yet");
  BitMask& mask = p.bit_mask;
  require(mask.kind <= BitMaskKind::drafts, "bit_mask.kind", static_cast<std::int64_t>(mask.kind),
          "allowed are none, keys and drafts");
  if (mask.kind == BitMaskKind::none) {
    mask = {};
    return;
  }
  const std::string got = "bits of " + std::string(to_string(mask.kind));
  if (!forward) refuse("bit_mask", got, "only forward takes them");
  if (lists) refuse("bit_mask", got, "they are not combined with lists of keys yet");
  if (mask.kind == BitMaskKind::keys) {
    require(mask.offsets, "bit_mask.offsets", std::int64_t{0}, "bits of keys need them");
    require(mask.row_bytes == 0, "bit_mask.row_bytes", mask.row_bytes, "it belongs to bits of drafts");
    return;
  }
  check_size("bit_mask.row_bytes", mask.row_bytes, 1);
  const std::int64_t reach = std::max<std::int64_t>(p.packed ? p.total_q : p.seq_q, 1);  // of one sequence at most
  if (mask.row_bytes > std::numeric_limits<std::int32_t>::max() / reach) {
    refuse("bit_mask.row_bytes", std::to_string(mask.row_bytes), "the bits of a sequence must fit in 2^31 bytes");
  }
  if (!p.packed && 8 * mask.row_bytes < p.seq_q) {
    refuse("bit_mask.row_bytes", std::to_string(mask.row_bytes),
           std::to_string(p.seq_q) + " queries need " + std::to_string((p.seq_q + 7) / 8) + " bytes a row");
  }
}

void check_bit_mask_offsets(const Problem& p, const Buffers& b) {
  if (!p.bit_mask.offsets || b.bit_mask_offsets == nullptr) return;
  for (std::int64_t i = 0; i <= p.batch; ++i) {
    const std::int32_t before = i == 0 ? 0 : b.bit_mask_offsets[i - 1];
    if (b.bit_mask_offsets[i] >= before) continue;
    refuse("bit_mask_offsets[" + std::to_string(i) + "]", std::to_string(b.bit_mask_offsets[i]),
           "it must not be less than " + std::to_string(before));
  }
}

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
