#pragma once

// Backward, in five products a tile, with a query in each SIMD lane as in forward:
//
//     for each block of 48 queries of this item:
//         for each tile of 64 keys that some query sees:
//             S = K Qt, dP = V dOt                 P and dS from them: gradient.h
//             dV += P dO, dK += dS Q               P and dS are broadcast from L1, dO and Q are vectors along head_dim
//             dQt += K^T dS
//         dQ = scale * dQt^T
//
// An item is a key head and every num_splits-th block of its queries (so that each item gets the same share of a causal
// mask). It has its own sums for dK and dV, at CpuRegion::key_gradients: [split][kv head][key of all sequences,
// padded][padded head_dim + head_dim_v]. A second step adds the splits in order, so every run has the same result. If
// all rows of a key head go over the keys together, the keys are split instead: key_gradients.h. The terms of dsink are
// at CpuRegion::sink_terms, one for each row; a third step adds them head by head. dbias.h is the fourth step.

#include "cpu/backward/gradient.h"
#include "cpu/backward/key_gradients.h"

namespace flash_attention::cpu {
namespace {

/// The state of a block of rows while the loop goes over the keys.
struct BackwardRows {
  GradientRows lanes;
  alignas(64) float dQt[max_head_dim * block_q];
  alignas(64) float Q[block_q * max_head_dim];  // rows of float, padded to whole vectors
  alignas(64) float dO[block_q * max_head_dim];
};

struct BackwardScratch {
  BackwardRows rows[max_blocks];
  GradientTile tile;
  alignas(64) float K[block_kv * max_head_dim];
  alignas(64) float V[block_kv * max_head_dim];
  alignas(64) float safe[block_kv * max_head_dim];
  alignas(64) float factor[block_q];
  KeySums sums;
};

inline void copy_rows(const Call& call, const RowBlock& block, const TensorView& tensor, int columns, float* to) {
  with_element(call.dtype, [&](auto type) {
    using T = decltype(type);
    const int stride = round_up(columns, vector_lanes);
    for (int row = 0; row < block.rows; ++row) {
      copy_row<T>(reinterpret_cast<const typename T::Stored*>(block.row(call, tensor, row)), columns, to + row * stride,
                  stride);
    }
  });
}

/// sums[key] += sum over the block's rows of W[key][row] * rows[row].
inline void add_to_keys(const RowBlock& block, const Tile& tile, const float* W, const float* rows, int columns,
                        float* sums, std::int64_t sums_stride, float* buffer) {
  const int stride = round_up(columns, vector_lanes);
  static_assert(block_q <= block_kv, "rows fit in make_safe's list");
  const SafeRows safe = make_safe({rows, stride}, block.rows, stride, tile.weighted, buffer);
  const int step = diagonal_step(tile);
  for (int key = 0; key < tile.count; key += step) {
    const int count = smaller(tile.count - key, step);
    const VectorsOfKeys vectors(block, tile, key, count);
    const int row = vectors.first * vector_lanes;
    multiply<Start::add, Order::row_major>({.A = W + key * block.lanes() + row,
                                            .a_stride = block.lanes(),
                                            .B = safe.rows.data + row * safe.rows.stride,
                                            .b_stride = safe.rows.stride,
                                            .C = sums + key * sums_stride,
                                            .c_stride = sums_stride,
                                            .rows = count,
                                            .depth = larger(smaller(block.rows, vectors.last * vector_lanes) - row, 0),
                                            .vectors = stride / vector_lanes});
  }
  add_nonfinite_rows(safe, W, {1, block.lanes()}, tile.count, sums, {sums_stride, 1}, columns);
}

inline void write_sink_terms(const Call& call, const RowBlock& block, const RowTerms& rows) {
  float* terms = region<float>(call, plan::CpuRegion::sink_terms);
  for (int lane = 0; lane < block.rows; ++lane) {
    const float share = exp2_one(call.sink[block.head[lane]] * log2_e - rows.lse[lane]);
    const bool empty = block.unused[lane] || rows.lse[lane] == infinity;  // dO of such a row may be NaN
    terms[block.row_idx(call, lane)] = empty ? 0 : -share * rows.delta[lane];
  }
}

inline void start_rows(const Call& call, const RowBlock& block, BackwardRows& rows) {
  rows.lanes.load_rows(call, block);
  copy_rows(call, block, call.q, call.head_dim, rows.Q);
  copy_rows(call, block, call.dout, call.head_dim_v, rows.dO);
  for (int i = 0; i < call.head_dim * block.lanes(); ++i) rows.dQt[i] = 0;
}

/// The five products of one tile of keys and one block.
inline void backward_tile(const Call& call, const RowBlock& block, const Tile& tile, FloatRows K, FloatRows V,
                          const KeyGradients& sums, BackwardRows& rows, BackwardScratch& scratch, NextTile& next) {
  scratch.tile.compute(call, block, tile, rows.lanes, K, V, &next);
  add_to_keys(block, tile, scratch.tile.P, rows.dO, call.head_dim_v, sums.dV(tile.begin), sums.stride(), scratch.safe);
  scratch.tile.through_softcap(call, tile.count * block.lanes());
  add_to_keys(block, tile, scratch.tile.dS, rows.Q, call.head_dim, sums.dK(tile.begin), sums.stride(), scratch.safe);
  add_to_lanes<Start::add>(block, tile, K, call.head_dim, scratch.tile.dS, rows.dQt, scratch.safe);
}

/// Loads the rows of all blocks of a list. sink_terms: whether this item writes the terms of dsink.
inline void start_blocks(const Call& call, const BlockList& blocks, bool sink_terms, BackwardScratch& scratch) {
  for (int b = 0; b < blocks.count; ++b) {
    start_rows(call, blocks[b], scratch.rows[b]);
    if (sink_terms) write_sink_terms(call, blocks[b], scratch.rows[b].lanes);
  }
}

inline void add_tiles(const Call& call, const BlockList& blocks, const KeyGradients& sums, BackwardScratch& scratch) {
  for_tiles(call, blocks, false, scratch, [&](int b, const Tile& tile, FloatRows K, FloatRows V, NextTile& next) {
    backward_tile(call, blocks[b], tile, K, V, sums, scratch.rows[b], scratch, next);
  });
}

/// Computes dQ from the rows.
inline void backward_blocks(const Call& call, const BlockList& blocks, const KeyGradients& sums, BackwardScratch& scratch) {
  start_blocks(call, blocks, call.dsink != nullptr, scratch);
  add_tiles(call, blocks, sums, scratch);
  for (int b = 0; b < blocks.count; ++b) write_dq(call, blocks[b], 0, scratch.rows[b].dQt, scratch.factor);
}

/// Processes the keys of one split, for all rows of their head.
inline void backward_keys(const Call& call, std::int64_t item, BackwardScratch& scratch) {
  const KeyItem at(call, item);
  BlockList blocks(call, at.batch, at.kv_head, 0, 1);
  take_keys(call, at.split, blocks[0], blocks);
  start_blocks(call, blocks, call.dsink != nullptr && at.split == 0, scratch);
  for_key_sums(call, blocks[0], blocks, scratch.sums,
               [&](const KeyGradients& sums) { add_tiles(call, blocks, sums, scratch); });
  for (int b = 0; b < blocks.count; ++b) write_dq(call, blocks[b], at.split, scratch.rows[b].dQt, scratch.factor);
}

/// Prefetches everything that backward reads of a block's rows.
inline void ask_for_rows(const Call& call, const RowBlock& block) {
  for (int row = 0; row < block.rows; ++row) {
    const auto ask = [&](const TensorView& tensor, int columns) {
      const char* begin = block.row(call, tensor, row);
      for (int byte = 0; byte < columns * bytes_of(call.dtype); byte += 64) __builtin_prefetch(begin + byte, 0, 2);
    };
    ask(call.q, call.head_dim);
    ask(call.dout, call.head_dim_v);
    ask(call.out, call.head_dim_v);
  }
}

/// Calls run(blocks, sums) for the blocks of rows of an item. If it is the only item of its key head, dK and dV are
/// written here, too, while their sums are in the cache.
template <class Run>
inline void for_each_block(const Call& call, std::int64_t item, Run run) {
  const KeyItem at(call, item);
  const KeyGradients sums(call, at.split, at.batch, at.kv_head);
  sums.clear(round_up(static_cast<int>(Sequence(call, at.batch).kv_rows), plan::cpu_key_unit));
  const std::int64_t step = call.num_splits * call.blocks_together;
  BlockList blocks(call, at.batch, at.kv_head, at.split, call.num_splits);
  for (std::int64_t first = at.split; blocks.count > 0; first += step) {
    const BlockList next(call, at.batch, at.kv_head, first + step, call.num_splits);
    for (int b = 0; b < next.count; ++b) ask_for_rows(call, next[b]);
    run(blocks, sums);
    blocks = next;
  }
  if (call.num_splits == 1) {
    write_key_gradients(call, at.batch, at.kv_head, sums, 0, Sequence(call, at.batch).kv_rows, 1);
  }
}

inline void backward(const Call& call, std::int64_t item, void* memory) {
  BackwardScratch& scratch = *static_cast<BackwardScratch*>(memory);
  if (splits_keys(call)) return backward_keys(call, item, scratch);
  for_each_block(call, item,
                 [&](const BlockList& blocks, const KeyGradients& sums) { backward_blocks(call, blocks, sums, scratch); });
}

constexpr int finish_keys = 256;  // keys that one item of the second step finishes

inline std::int64_t finish_backward_items(const Call& call) {
  if (call.num_splits == 1 || splits_keys(call)) return 0;
  return call.batch * call.heads_kv * ceil_div(call.seq_kv, finish_keys);
}

/// Writes dK and dV of some keys if the blocks of a key head were split.
inline void finish_backward(const Call& call, std::int64_t item, void* /*scratch*/) {
  const std::int64_t chunks = ceil_div(call.seq_kv, finish_keys), first = item % chunks * finish_keys;
  const std::int64_t batch = item / chunks / call.heads_kv;
  const int kv_head = static_cast<int>(item / chunks % call.heads_kv);
  const std::int64_t last = smaller(first + finish_keys, Sequence(call, batch).kv_rows);
  write_key_gradients(call, batch, kv_head, KeyGradients(call, 0, batch, kv_head), first, last, call.num_splits);
}

inline std::int64_t sink_items(const Call& call) { return call.dsink != nullptr ? call.heads_q : 0; }

inline void finish_sink(const Call& call, std::int64_t head, void* /*scratch*/) {
  const float* terms = region<const float>(call, plan::CpuRegion::sink_terms);
  const bool packed = call.cu_seqlens_q != nullptr;
  double sum = 0;
  for (std::int64_t batch = 0; batch < (packed ? 1 : call.batch); ++batch) {
    const std::int64_t stride = packed ? call.total_q : call.seq_q;
    const std::int64_t rows = packed ? call.cu_seqlens_q[call.batch] : stride;  // no thread wrote terms of later rows
    for (std::int64_t i = 0; i < rows; ++i) sum += terms[(batch * call.heads_q + head) * stride + i];
  }
  call.dsink[head] = static_cast<float>(sum);
}

}  // namespace
}  // namespace flash_attention::cpu
