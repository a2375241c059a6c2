#pragma once

// Forward over listed keys: the same as prefill.h, for blocks of rows that share a list, over tiles of keys that are
// gathered by the list. A tile only holds keys that a row may see.

#include "cpu/listed/keys.h"
#include "cpu/prefill/prefill.h"

namespace flash_attention::cpu {
namespace {

/// A block of work: the rows of one list, at most block_q.
struct ListItem {
  std::int64_t batch, list_row, chunk;
  int unit;

  ListItem(const Call& call, const ListShape& shape, std::int64_t item) {
    chunk = item % list_chunks(call, shape);
    item /= list_chunks(call, shape);
    unit = static_cast<int>(item % shape.units);
    item /= shape.units;
    list_row = item % list_rows(call);
    batch = item / list_rows(call);
  }
};

inline std::int64_t listed_items(const Call& call) {
  const ListShape shape(call);
  return call.batch * list_rows(call) * shape.units * list_chunks(call, shape);
}

inline void forward_listed(const Call& call, std::int64_t item_idx, void* memory) {
  PrefillScratch& scratch = *static_cast<PrefillScratch*>(memory);
  const ListShape shape(call);
  const ListItem item(call, shape, item_idx);
  const ListBlock block(call, shape, item.batch, item.unit, item.list_row, item.chunk);
  if (block.rows.rows == 0) return;
  PrefillRows& rows = scratch.rows[0];
  rows.start(call, block.rows, scratch.K);
  ListedKeys listed(call, block);
  std::int32_t keys[block_kv];
  for (int count = listed.next(keys); count > 0; count = listed.next(keys)) {
    const ListedTile gathered = gather_tile(call, block.rows, keys, count, scratch.K, scratch.V, scratch.safe);
    const Tile tile(count);
    multiply_keys(block.rows, tile, 0, count, gathered.K, rows.Qt, call.head_dim, scratch.S);
    finish_listed(call, block.rows, keys, count, scratch.S, nullptr);
    softmax_tile(block.rows, count, scratch.S, rows.statistics, scratch.rescale);
    if (call.dropout) {
      listed_dropout(call, block.rows, keys, count, scratch.keep);
      for (int i = 0; i < count * block.rows.lanes(); i += vector_lanes) {
        store(scratch.S + i, load(scratch.S + i) * load(scratch.keep + i));
      }
    }
    if (rows.started) {
      add_to_lanes<Start::rescale>(block.rows, tile, gathered.V, call.head_dim_v, scratch.S, rows.Ot, scratch.safe,
                                   scratch.rescale);
    } else {
      add_to_lanes<Start::zero>(block.rows, tile, gathered.V, call.head_dim_v, scratch.S, rows.Ot, scratch.safe);
    }
    rows.started = true;
  }
  if (!rows.started) {
    for (int i = 0; i < round_up(call.head_dim_v, vector_lanes) * block.rows.lanes(); ++i) rows.Ot[i] = 0;
  }
  for (int lane = 0; call.row_max != nullptr && lane < block.rows.rows; ++lane) {
    call.row_max[block.rows.row_idx(call, lane)] = rows.statistics.row_max[lane] * ln_2;
  }
  write_block(call, block.rows, 0, rows.statistics, rows.Ot, scratch.rescale);
}

}  // namespace
}  // namespace flash_attention::cpu
