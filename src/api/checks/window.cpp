#include "api/checks/window.h"

#include <algorithm>
#include <optional>

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

}  // namespace flash_attention::api
