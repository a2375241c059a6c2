#pragma once

// How much attention each key has received: key_mass[key] = sum over the queries of P[query][key]. It needs each row's
// lse, so it is a step after forward, which computes the scores again:
//
//     for some keys of a query head:
//         for each block of 48 queries that see some of them:
//             S = K Qt,  P = 2^(S - lse),  mass += P        a query a lane: a key's sums lie in the lanes of a vector
//
// One item owns its results and adds in a fixed order, so every run has the same bits.

#include "cpu/tile/hidden.h"
#include "cpu/tile/scores.h"

namespace flash_attention::cpu {
namespace {

constexpr int mass_tiles = 4;  // tiles of keys of an item: rows are put in lanes once for all of them
constexpr int mass_keys = mass_tiles * block_kv;

/// A block of rows whose scores are computed again.
struct ScoreRows {
  alignas(64) float Qt[max_head_dim * block_q];
  alignas(64) float lse[block_q];  // in units of log2(e); +inf for a row that sees nothing, and for lanes past the rows

  void load_rows(const Call& call, const RowBlock& block) {
    gather_rows(call, block, call.q, call.head_dim, query_factor(call), Qt);
    constexpr float lowest = -1e7f;  // below it a float has no room for the sum next to the maximum: docs/numerics.md
    for (int lane = 0; lane < block.lanes(); ++lane) {
      const float row = call.lse[block.row_idx(call, lane)];
      lse[lane] = lane >= block.rows || block.unused[lane] || row < lowest ? infinity : row * log2_e;
    }
  }
};

struct MassScratch {
  ScoreRows rows;
  alignas(64) float S[block_kv * block_q];
  alignas(64) float K[block_kv * max_head_dim];
  alignas(64) float sum[mass_keys * vector_lanes];
};

/// Turns S of a tile into P, for one block of rows of one head.
inline void probabilities(const Call& call, const RowBlock& block, const Tile& tile, const ScoreRows& rows, FloatRows K,
                          float* S) {
  score_tile(call, block, tile, K, rows.Qt, S);
  for (int key = 0; key < tile.count; ++key) {
    for (int v = 0; v < block.lanes(); v += vector_lanes) {
      float* s = S + key * block.lanes() + v;
      const Vec score = load(s);
      store(s, select(score == -infinity, Vec{}, exp2(score - load(rows.lse + v))));
    }
  }
}

/// The place of a sequence and head in the masses and their gradients.
inline std::int64_t mass_place(const Call& call, const Sequence& sequence, std::int64_t batch, int head) {
  if (call.cu_seqlens_kv != nullptr) return head * call.total_kv + sequence.kv_begin;
  return (batch * call.heads_q + head) * call.seq_kv;
}

inline std::int64_t mass_items(const Call& call) {
  return call.key_mass == nullptr ? 0 : call.batch * call.heads_q * ceil_div(call.seq_kv, mass_keys);
}

inline void key_mass(const Call& call, std::int64_t item, void* memory) {
  MassScratch& scratch = *static_cast<MassScratch*>(memory);
  const std::int64_t chunks = ceil_div(call.seq_kv, mass_keys), first = item % chunks * mass_keys;
  const int head = static_cast<int>(item / chunks % call.heads_q);
  const std::int64_t batch = item / chunks / call.heads_q;
  const Sequence sequence(call, batch);
  const std::int64_t last = smaller<std::int64_t>(first + mass_keys, sequence.kv_rows);
  for (float& sum : scratch.sum) sum = 0;
  for (std::int64_t row = 0; row < sequence.q_rows; row += block_q) {
    const RowBlock block(call, batch, head, 1, row);
    if (block.key_begin >= last || block.key_end <= first) continue;
    bool loaded = false;
    for (std::int64_t begin = first; begin < smaller(last, block.key_end); begin += block_kv) {
      if (begin + block_kv <= block.key_begin) continue;
      const Tile tile(call, block, begin);
      if (tile.seen == Seen::none) continue;
      if (!loaded) scratch.rows.load_rows(call, block);
      loaded = true;
      const FloatRows K = key_rows(call, block, call.k, begin, tile.count, call.head_dim, false, scratch.K);
      probabilities(call, block, tile, scratch.rows, K, scratch.S);
      float* sum = scratch.sum + (begin - first) * vector_lanes;
      for (int key = 0; key < tile.count; ++key, sum += vector_lanes) {
        Vec total = load(sum);
        for (int v = 0; v < block.lanes(); v += vector_lanes) total += load(scratch.S + key * block.lanes() + v);
        store(sum, total);
      }
    }
  }
  float* to = call.key_mass + mass_place(call, sequence, batch, head);
  for (std::int64_t key = first; key < last; ++key) to[key] = sum_lanes(load(scratch.sum + (key - first) * vector_lanes));
}

}  // namespace
}  // namespace flash_attention::cpu
