#pragma once

// The textbook algorithm, as a baseline: each step goes over whole score matrices in memory. Its products are the same,
// so the difference to flash attention is due to memory and to scores that no query sees. CpuRegion::S holds S, then P;
// CpuRegion::dS holds dS. Each is [kv head][block of all sequences][key][block_q].

#include <limits>

#include "cpu/backward/backward.h"

namespace flash_attention::cpu {
namespace {

inline std::int64_t standard_items(const Call& call) { return call.batch * call.heads_kv * blocks_per_head(call); }

/// Matrix `which` of a block: [key][lanes].
inline float* score_matrix(const Call& call, plan::CpuRegion which, std::int64_t item) {
  const bool packed = call.cu_seqlens_q != nullptr;
  const std::int64_t blocks = blocks_per_head(call), kv_head = item / blocks % call.heads_kv;
  const std::int64_t batch = item / blocks / call.heads_kv, rows = call.seq_q * call.group;
  const std::int64_t first = packed ? call.cu_seqlens_q[batch] * call.group / block_q + batch : batch * blocks;
  const std::int64_t place =
      kv_head * plan::cpu_places(packed, call.batch, rows, call.total_q * call.group, block_q) + first + item % blocks;
  return region<float>(call, which) + place * call.seq_kv * block_q;
}

/// The rows of an item, over all keys.
inline RowBlock standard_rows(const Call& call, std::int64_t item) {
  const std::int64_t blocks = blocks_per_head(call);
  const int kv_head = static_cast<int>(item / blocks % call.heads_kv);
  RowBlock block(call, item / blocks / call.heads_kv, kv_head * call.group, call.group, item % blocks * block_q);
  block.key_begin = 0;
  block.key_end = block.sequence.kv_used;
  return block;
}

inline Tile standard_tile(const Call& call, const RowBlock& block, std::int64_t begin) {
  Tile tile(call, block, begin);
  if (tile.seen == Seen::none) {
    tile.seen = Seen::some;
    tile.mask.hide_all(block, tile.count);
  }
  return tile;
}

template <class Use>
inline void for_each_tile(const Call& call, const RowBlock& block, Use use) {
  for (std::int64_t begin = 0; begin < block.key_end; begin += block_kv) use(standard_tile(call, block, begin));
}

inline void standard_scores(const Call& call, std::int64_t item, void* memory) {
  PrefillScratch& scratch = *static_cast<PrefillScratch*>(memory);
  PrefillRows& rows = scratch.rows[0];
  const RowBlock block = standard_rows(call, item);
  if (block.rows == 0) return;
  gather_rows(call, block, call.q, call.head_dim, query_factor(call), rows.Qt);
  for_each_tile(call, block, [&](const Tile& tile) {
    const FloatRows K = key_rows(call, block, call.k, tile.begin, tile.count, call.head_dim, false, scratch.K);
    score_tile(call, block, tile, K, rows.Qt, score_matrix(call, plan::CpuRegion::S, item) + tile.begin * block.lanes());
  });
}

inline void standard_softmax(const Call& call, std::int64_t item, void* memory) {
  PrefillScratch& scratch = *static_cast<PrefillScratch*>(memory);
  PrefillRows& rows = scratch.rows[0];
  const RowBlock block = standard_rows(call, item);
  if (block.rows == 0) return;
  float* P = score_matrix(call, plan::CpuRegion::S, item);
  rows.statistics.reset();
  softmax_tile(block, static_cast<int>(block.key_end), P, rows.statistics, scratch.rescale);
  for (int lane = 0; lane < block.lanes(); ++lane) {
    const RowResult result = finish_row(call, block, lane, rows.statistics.row_max[lane], rows.statistics.row_sum[lane]);
    // A probability of 0 means hidden here. A sink may make all probabilities of a row 0; that hides none of its keys.
    const bool seen = rows.statistics.row_sum[lane] != 0;
    scratch.rescale[lane] = seen && result.factor == 0 ? std::numeric_limits<float>::min() : result.factor;
    write_lse(call, block, lane, result.lse);
  }
  for (std::int64_t key = 0; key < block.key_end; ++key) {
    for (int v = 0; v < block.lanes(); v += vector_lanes) {
      float* p = P + key * block.lanes() + v;
      store(p, load(p) * load(scratch.rescale + v));
    }
  }
  if (!call.dropout) return;
  for_each_tile(call, block,
                [&](const Tile& tile) { apply_dropout(call, block, tile, P + tile.begin * block.lanes(), scratch.keep); });
}

inline void standard_values(const Call& call, std::int64_t item, void* memory) {
  PrefillScratch& scratch = *static_cast<PrefillScratch*>(memory);
  PrefillRows& rows = scratch.rows[0];
  const RowBlock block = standard_rows(call, item);
  if (block.rows == 0) return;
  for (int i = 0; i < call.head_dim_v * block.lanes(); ++i) rows.Ot[i] = 0;
  for_each_tile(call, block, [&](const Tile& tile) {
    const FloatRows V = key_rows(call, block, call.v, tile.begin, tile.count, call.head_dim_v, false, scratch.V);
    add_to_lanes<Start::add>(block, tile, V, call.head_dim_v,
                             score_matrix(call, plan::CpuRegion::S, item) + tile.begin * block.lanes(), rows.Ot,
                             scratch.safe);
  });
  for (int lane = 0; lane < block.lanes(); ++lane) scratch.rescale[lane] = 1;
  scatter_rows(call, block, rows.Ot, call.head_dim_v, scratch.rescale, call.out);
}

/// Computes P and dS of a whole block.
inline void standard_score_gradients(const Call& call, std::int64_t item, void* memory) {
  BackwardScratch& scratch = *static_cast<BackwardScratch*>(memory);
  BackwardRows& rows = scratch.rows[0];
  const RowBlock block = standard_rows(call, item);
  if (block.rows == 0) return;
  rows.lanes.load_rows(call, block);
  if (call.dsink != nullptr) write_sink_terms(call, block, rows.lanes);
  for_each_tile(call, block, [&](const Tile& tile) {
    const FloatRows K = key_rows(call, block, call.k, tile.begin, tile.count, call.head_dim, false, scratch.K);
    const FloatRows V = key_rows(call, block, call.v, tile.begin, tile.count, call.head_dim_v, false, scratch.V);
    scratch.tile.compute(call, block, tile, rows.lanes, K, V);
    scratch.tile.through_softcap(call, tile.count * block.lanes());
    const std::int64_t at = tile.begin * block.lanes();
    for (int i = 0; i < tile.count * block.lanes(); i += vector_lanes) {
      store(score_matrix(call, plan::CpuRegion::S, item) + at + i, load(scratch.tile.P + i));
      store(score_matrix(call, plan::CpuRegion::dS, item) + at + i, load(scratch.tile.dS + i));
    }
  });
}

inline void standard_dq(const Call& call, std::int64_t item, void* memory) {
  BackwardScratch& scratch = *static_cast<BackwardScratch*>(memory);
  BackwardRows& rows = scratch.rows[0];
  const RowBlock block = standard_rows(call, item);
  if (block.rows == 0) return;
  for (int i = 0; i < call.head_dim * block.lanes(); ++i) rows.dQt[i] = 0;
  for_each_tile(call, block, [&](const Tile& tile) {
    const FloatRows K = key_rows(call, block, call.k, tile.begin, tile.count, call.head_dim, false, scratch.K);
    add_to_lanes<Start::add>(block, tile, K, call.head_dim,
                             score_matrix(call, plan::CpuRegion::dS, item) + tile.begin * block.lanes(), rows.dQt,
                             scratch.safe);
  });
  for (int lane = 0; lane < block.lanes(); ++lane) scratch.factor[lane] = call.scale;
  scatter_rows(call, block, rows.dQt, call.head_dim, scratch.factor, call.dq);
}

inline std::int64_t standard_key_items(const Call& call) {
  return call.batch * call.heads_kv * ceil_div(call.seq_kv, block_kv);
}

/// Computes dK and dV of a tile of keys, from P and dS of all blocks of rows.
inline void standard_dkv(const Call& call, std::int64_t item, void* memory) {
  BackwardScratch& scratch = *static_cast<BackwardScratch*>(memory);
  BackwardRows& rows = scratch.rows[0];
  const std::int64_t tiles = ceil_div(call.seq_kv, block_kv), head_idx = item / tiles, begin = item % tiles * block_kv;
  const int columns = round_up(call.head_dim, vector_lanes), columns_v = round_up(call.head_dim_v, vector_lanes);
  float *dK = scratch.K, *dV = scratch.V;
  for (int i = 0; i < block_kv * columns; ++i) dK[i] = 0;
  for (int i = 0; i < block_kv * columns_v; ++i) dV[i] = 0;
  for (std::int64_t r = 0; r < blocks_per_head(call); ++r) {
    const std::int64_t block_item = head_idx * blocks_per_head(call) + r;
    const RowBlock block = standard_rows(call, block_item);
    if (block.rows == 0 || begin >= block.key_end) continue;
    const Tile tile = standard_tile(call, block, begin);
    const std::int64_t at = begin * block.lanes();
    copy_rows(call, block, call.q, call.head_dim, rows.Q);
    copy_rows(call, block, call.dout, call.head_dim_v, rows.dO);
    add_to_keys(block, tile, score_matrix(call, plan::CpuRegion::S, block_item) + at, rows.dO, call.head_dim_v, dV,
                columns_v, scratch.safe);
    add_to_keys(block, tile, score_matrix(call, plan::CpuRegion::dS, block_item) + at, rows.Q, call.head_dim, dK, columns,
                scratch.safe);
  }
  const Sequence sequence(call, head_idx / call.heads_kv);
  const int keys = static_cast<int>(larger<std::int64_t>(smaller<std::int64_t>(block_kv, sequence.kv_rows - begin), 0));
  const auto write = [&](const TensorView& tensor, const float* sums, int width, int stride, float factor) {
    with_element(call.dtype, [&](auto type) {
      using T = decltype(type);
      for (int key = 0; key < keys; ++key) {
        auto* to = reinterpret_cast<typename T::Stored*>(tensor.data) + head_idx / call.heads_kv * tensor.batch_stride +
                   (sequence.kv_begin + begin + key) * tensor.seq_stride + head_idx % call.heads_kv * tensor.head_stride;
        for (int c = 0; c < width; c += vector_lanes)
          store_some<T>(to + c, load(sums + key * stride + c) * factor, width - c);
      }
    });
  };
  write(call.dk, dK, call.head_dim, columns, call.scale);
  write(call.dv, dV, call.head_dim_v, columns_v, 1);
}

}  // namespace
}  // namespace flash_attention::cpu
