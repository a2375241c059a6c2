#pragma once

#include "ptx/path.cuh"
#include "ptx/shared.cuh"
#include "tile/dropout.cuh"
#include "tile/key_list.cuh"
#include "tile/score.cuh"
#include "tile/tail.cuh"

// Attention over listed keys on CUDA cores: every dtype, every head_dim, any GPU. docs/kernels/listed.md.
//
// One block of 256 threads computes 64 rows that share a list. These are the heads of one query that have a key head in
// common, times the queries that the list serves.
//
//   for each 64 keys of the list:          found in its order; entries that are no keys are hidden
//     S = Q K^T                            rows of K from where the list says
//     S = score(S), hidden where masked
//     P = exp(S - max so far)              O and the sums are scaled down if the maximum grew
//     O = O + P V
//   O = O / sum,  lse = max + log(sum)

namespace flash_attention {

using namespace abi;

template <ForwardConfig config>
struct ForwardListed {
  static constexpr Features features = config.features;
  static constexpr int columns = tile::columns_per_thread(config.head_dim_v);
  using Element = ptx::Element<features.dtype>;
  static_assert(config.block_q == tile::block_rows && config.block_kv == tile::block_rows && config.num_warps == 8);

  struct SharedStorage {
    tile::ProductStorage<config.head_dim_v> product;
    tile::WeightTile P;
    tile::KeyTile keys;
  };

  /// This thread's part of the running softmax and output.
  struct State {
    float row_max[4];
    float row_sum[4];
    float O[4][columns];
  };

  /// Turns dot products into scores. A score is hidden if the row does not see the key, or the entry is no key.
  __device__ static void score_tile(float (&S)[4][4], const AttentionArgs& args, const tile::Sequence& sequence,
                                    const tile::ListRows& rows, const tile::KeyTile& keys) {
    const tile::ThreadPlace place;
#pragma unroll 1
    for (int r = 0; r < 4; ++r) {
      const bool exists = place.row + r < rows.count;
      const int i = exists ? rows.query(place.row + r) : 0, head = exists ? rows.head(place.row + r) : rows.first_head;
      const tile::Score<features> score(args, sequence, head);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int j = keys.key[place.column + c];
        const bool sees = exists && j >= 0 && score.sight.visible(i, j);
        S[r][c] = sees ? score.full(S[r][c], i, j) : tile::hidden();
      }
    }
  }

  /// S = exp(S - row_max). Rescales the state to the new maximum and adds the new terms to the sums.
  __device__ static void softmax_tile(float (&S)[4][4], State& state) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      float tile_max = -tile::infinity;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (!tile::is_hidden(S[r][c])) tile_max = ptx::max(tile_max, S[r][c]);
      }
      const float new_max = ptx::max(state.row_max[r], tile::row_maximum(tile_max));
      const float reference = new_max == -tile::infinity ? 0 : new_max;  // exp(-inf - 0) = 0, without NaN
      const float rescale = tile::exp(state.row_max[r] - reference);
      state.row_max[r] = new_max;
      float total = 0;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (tile::is_hidden(S[r][c])) continue;
        S[r][c] = tile::exp(S[r][c] - reference);
        total += S[r][c];
      }
      state.row_sum[r] = state.row_sum[r] * rescale + total;
#pragma unroll
      for (int n = 0; n < columns; ++n) state.O[r][n] *= rescale;
    }
  }

  /// A dropped probability is marked as hidden: its value is skipped, so a NaN there does not reach the output.
  __device__ static void drop_tile(float (&P)[4][4], const AttentionArgs& args, const tile::Sequence& sequence,
                                   const tile::ListRows& rows, const tile::KeyTile& keys) {
    const tile::ThreadPlace place;
#pragma unroll 1
    for (int r = 0; r < 4; ++r) {
      if (place.row + r >= rows.count) continue;
      const tile::Dropout dropout(args, sequence.batch_idx, rows.head(place.row + r));
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (tile::is_hidden(P[r][c])) continue;
        const bool kept = dropout.keeps(rows.query(place.row + r), keys.key[place.column + c]);
        P[r][c] = kept ? P[r][c] * dropout.keep_scale : tile::hidden();
      }
    }
  }

  /// Divides by the sums, the sink included, and writes O and lse.
  __device__ static void finish(const AttentionArgs& args, const tile::Sequence& sequence, const tile::ListRows& rows,
                                State& state) {
    const tile::ThreadPlace place;
    const auto O = tile::stacked_rows<Element, features>(args.O, sequence, rows);
    const bool by_four = tile::rows_move_by_four(O);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int row = place.row + r;
      float sum = tile::row_total(state.row_sum[r]);
      if (row >= rows.count) continue;
      const int i = rows.query(row), head = rows.head(row);
      float row_max = state.row_max[r], factor = sum == 0 ? 0 : 1 / sum;
      if (args.row_max != nullptr && place.column == 0)
        args.row_max[tile::statistics_offset<features>(args, sequence, head) + i] = row_max;
      if (features.sink && i < sequence.len_q) {
        const float sink = args.sink[head];
        const float new_max = ptx::max(row_max, sink);
        const float reference = new_max == -tile::infinity ? 0 : new_max;
        factor = sum == 0 ? 0 : 1 / (sum + tile::exp(sink - row_max));  // O was summed relative to row_max
        if (sum != 0 && factor == 0) factor = tile::smallest;           // a row that has keys, but the sink dominates
        sum = sum * tile::exp(row_max - reference) + tile::exp(sink - reference);
        row_max = new_max;
      }
      if (args.lse != nullptr && place.column == 0) {
        float* lse = args.lse + tile::statistics_offset<features>(args, sequence, head);
        lse[i] = sum == 0 ? -tile::infinity : row_max + tile::log(sum);
      }
#pragma unroll
      for (int panel = 0; panel < columns / 4; ++panel) {
        const int column = 64 * panel + place.column;
        if (column >= config.head_dim_v) continue;
        tile::Four values;
#pragma unroll
        for (int c = 0; c < 4; ++c) values[c] = factor == 0 ? 0 : state.O[r][4 * panel + c] * factor;
        tile::store_four_of<config.head_dim_v>(O.row(row), column, values, by_four);
      }
    }
  }
};

template <ForwardConfig config>
__device__ __forceinline__ void forward_listed(const AttentionArgs& args) {
  using Kernel = ForwardListed<config>;
  constexpr Features features = config.features;
  auto& storage = ptx::shared_storage<typename Kernel::SharedStorage>();
  tile::clear_output_tail<config>(args, threadIdx.x, tile::product_threads);

  const tile::ListTask task = tile::list_task<features>(args);
  const tile::Sequence& sequence = task.sequence;
  const tile::ListRows& rows = task.rows;
  if (rows.count <= 0) return;

  const int kv_head_idx = rows.first_head / args.group;
  const tile::KeyListView list(args, sequence, features.packed, task.list_row, task.list_head);
  const auto Q = tile::stacked_rows<const typename Kernel::Element, features>(args.Q, sequence, rows);
  using Key = const typename Kernel::Element;
  const auto K = tile::key_source<Key, features>(args, args.K, sequence, kv_head_idx);
  const auto V = tile::key_source<Key, features>(args, args.V, sequence, kv_head_idx);
  const tile::GatheredRows<decltype(K)> K_rows{K, storage.keys.key, tile::block_rows};
  const tile::GatheredRows<decltype(V)> V_rows{V, storage.keys.key, tile::block_rows};

  typename Kernel::State state{};
  for (float& row_max : state.row_max) row_max = -tile::infinity;
  // The keys that any of the rows may see.
  const tile::Visibility<features> sight(args, sequence, rows.first_head);
  const tile::KeyRange range = sight.keys_of_any(rows.query(0), rows.query(rows.count - 1) + 1);

#pragma unroll 1
  for (long long begin = 0; begin < tile::listed_keys(args, list); begin += tile::block_rows) {
    if (!tile::find_keys<features>(args, list, begin, sequence.len_kv, tile::max(range.begin, 0), range.end, storage.keys))
      continue;
    ptx::path<"forward/listed tile">();
    float S[4][4]{};
    if constexpr (features.latent) {
      auto own_Q = Q;
      own_Q.data += config.head_dim_v;
      tile::add_dot_products<config.head_dim_v>(S, Q, V_rows, storage.product);
      tile::add_dot_products<config.head_dim - config.head_dim_v>(S, own_Q, K_rows, storage.product);
    } else {
      tile::add_dot_products<config.head_dim>(S, Q, K_rows, storage.product);
    }
    Kernel::score_tile(S, args, sequence, rows, storage.keys);
    Kernel::softmax_tile(S, state);
    if constexpr (features.dropout) Kernel::drop_tile(S, args, sequence, rows, storage.keys);
    tile::store_weights_by_column(storage.P, S);
    tile::add_weighted_rows<config.head_dim_v>(state.O, storage.P, V_rows, storage.product, true);
  }
  Kernel::finish(args, sequence, rows, state);
}

}  // namespace flash_attention
