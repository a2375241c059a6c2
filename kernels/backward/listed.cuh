#pragma once

#include "ptx/atomic.cuh"
#include "ptx/path.cuh"
#include "ptx/shared.cuh"
#include "tile/dropout.cuh"
#include "tile/key_list.cuh"
#include "tile/score.cuh"
#include "tile/workspace.cuh"

// Backward over listed keys on CUDA cores: every dtype, every head_dim, any GPU, the same bits in every run.
//
// Five kernels; delta comes from backward/delta.cuh.
//
//   dQ: a block takes 64 rows that share a list, as forward/listed does, and goes over its keys.
//   The inverse of the lists tells which lists name a key. It is sorted by keys: a stable counting sort in three steps.
//     count:   each block takes a chunk of the lists of a sequence and counts how often they name each block of keys
//     offsets: where the lists that name a block of keys begin, and within them those of each chunk
//     fill:    each block goes over its chunk again, list by list, and writes the lists' numbers in this order
//   dK, dV: a block takes one key of one key head and goes over the lists that name it, in their order: a warp takes a
//           row, its lanes take the columns.
//
// If a list names a key twice, the list is in the key's inverse twice. In a set the second entry counts nowhere.

namespace flash_attention {

using namespace abi;

/// The addresses of the inverse of the lists in the workspace.
struct InverseLists {
  int list_rows;  // lists of a sequence and head
  int key_units;  // blocks of keys of a sequence
  int chunks;     // of the lists

  __device__ __forceinline__ explicit InverseLists(const AttentionArgs& args)
      : list_rows(tile::ceil_div(args.seq_q, args.list_block_q)),
        key_units(tile::ceil_div(args.seq_kv, args.list_block_kv)),
        chunks(args.num_splits) {}

  /// How often each block of keys is named, [chunk][block of keys]; later, the place of the next number.
  __device__ __forceinline__ unsigned* counts(const AttentionArgs& args, long long plane) const {
    return tile::workspace<unsigned>(args, BackwardListedRegion::counts) + plane * chunks * key_units;
  }
  /// The first list of each block of keys; after the last block, the end.
  __device__ __forceinline__ unsigned* begins(const AttentionArgs& args, long long plane) const {
    return tile::workspace<unsigned>(args, BackwardListedRegion::begins) + plane * (key_units + 1);
  }
  /// The numbers of lists.
  __device__ __forceinline__ int* lists(const AttentionArgs& args, long long plane) const {
    return tile::workspace<int>(args, BackwardListedRegion::lists) + plane * list_rows * args.list_entries;
  }
};

template <BackwardConfig config>
struct BackwardListed {
  static constexpr Features features = config.features;
  static constexpr int dim = config.head_dim, dim_v = config.head_dim_v;
  static constexpr int block = tile::block_rows;
  using Element = ptx::Element<features.dtype>;
  static_assert(config.block_q == block && config.block_kv == block && config.num_warps == 8);

  struct SharedStorage {
    tile::ProductStorage<tile::max(dim, dim_v)> product;
    tile::WeightTile weights;
    tile::KeyTile keys;
  };

  /// For a visible pair: P after dropout, and dS at the dot product, without the scale.
  struct Gradient {
    float p = 0, ds = 0;
    bool dropped = false;

    __device__ __forceinline__ Gradient(const AttentionArgs& args, const tile::Sequence& sequence,
                                        const tile::Score<features>& score, int head, int i, int j, float dot, float dp,
                                        float lse, float delta) {
      float of_cap;
      const float value = score.capped(dot, of_cap) + score.added(i, j);
      const float probability = lse < tile::lowest_lse ? 0 : tile::exp(value - lse);
      float factor = 1;
      if constexpr (features.dropout) {
        const tile::Dropout dropout(args, sequence.batch_idx, head);
        factor = dropout.keeps(i, j) ? dropout.keep_scale : 0;
      }
      dropped = features.dropout && factor == 0;  // it does not count, not even as NaN
      p = probability * factor;
      ds = probability * ((dropped ? 0 : dp * factor) - delta) * of_cap;
    }
  };
};

template <BackwardConfig config>
__device__ __forceinline__ void backward_listed_dq(const AttentionArgs& args) {
  using Kernel = BackwardListed<config>;
  using Element = typename Kernel::Element;
  constexpr Features features = config.features;
  auto& storage = ptx::shared_storage<typename Kernel::SharedStorage>();

  const tile::ListTask task = tile::list_task<features>(args);
  const tile::Sequence& sequence = task.sequence;
  const tile::ListRows& rows = task.rows;
  if (rows.count <= 0) return;

  const int kv_head_idx = rows.first_head / args.group;
  const tile::KeyListView list(args, sequence, features.packed, task.list_row, task.list_head);
  const auto Q = tile::stacked_rows<const Element, features>(args.Q, sequence, rows);
  const auto dO = tile::stacked_rows<const Element, features>(args.dO, sequence, rows);
  const auto K = tile::key_rows<const Element, features>(args.K, sequence, kv_head_idx);
  const auto V = tile::key_rows<const Element, features>(args.V, sequence, kv_head_idx);
  const tile::GatheredRows<decltype(K)> K_rows{K, storage.keys.key, tile::block_rows};
  const tile::GatheredRows<decltype(V)> V_rows{V, storage.keys.key, tile::block_rows};
  const tile::ThreadPlace place;
  const auto* delta = tile::workspace<const float>(args, BackwardRegion::delta);
  const tile::Visibility<features> sight(args, sequence, rows.first_head);
  const tile::KeyRange range = sight.keys_of_any(rows.query(0), rows.query(rows.count - 1) + 1);

  float dQ[4][tile::columns_per_thread(config.head_dim)]{};
#pragma unroll 1
  for (long long begin = 0; begin < tile::listed_keys(args, list); begin += tile::block_rows) {
    if (!tile::find_keys<features>(args, list, begin, sequence.len_kv, tile::max(range.begin, 0), range.end, storage.keys))
      continue;
    ptx::path<"backward/listed tile">();
    float S[4][4]{}, dP[4][4]{};
    tile::add_dot_products<config.head_dim>(S, Q, K_rows, storage.product);
    tile::add_dot_products<config.head_dim_v>(dP, dO, V_rows, storage.product);
#pragma unroll 1
    for (int r = 0; r < 4; ++r) {
      const bool exists = place.row + r < rows.count;
      const int i = exists ? rows.query(place.row + r) : 0, head = exists ? rows.head(place.row + r) : rows.first_head;
      const tile::Score<features> score(args, sequence, head);
      const long long statistics = tile::statistics_offset<features>(args, sequence, head) + i;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int j = storage.keys.key[place.column + c];
        if (!exists || j < 0 || !score.sight.visible(i, j)) {
          S[r][c] = tile::hidden();
          continue;
        }
        S[r][c] = typename Kernel::Gradient(args, sequence, score, head, i, j, S[r][c], dP[r][c], args.lse[statistics],
                                            delta[statistics])
                      .ds;
      }
    }
    tile::store_weights_by_column(storage.weights, S);
    tile::add_weighted_rows<config.head_dim>(dQ, storage.weights, K_rows, storage.product, true);
  }
  const auto to = tile::stacked_rows<Element, features>(args.dQ, sequence, rows);
  const bool by_four = tile::rows_move_by_four(to);
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    if (place.row + r >= rows.count) continue;
#pragma unroll
    for (int panel = 0; panel < tile::columns_per_thread(config.head_dim) / 4; ++panel) {
      const int column = 64 * panel + place.column;
      if (column >= config.head_dim) continue;
      tile::Four values;
#pragma unroll
      for (int c = 0; c < 4; ++c) values[c] = dQ[r][4 * panel + c] * args.scale;
      tile::store_four_of<config.head_dim>(to.row(place.row + r), column, values, by_four);
    }
  }
}

/// Calls visit(list, block of keys) for each entry of a chunk of lists, list by list.
template <Features features, typename Visit>
__device__ __forceinline__ void for_entries(const AttentionArgs& args, const InverseLists& inverse, Visit visit) {
  const long long plane = blockIdx.x / inverse.chunks;
  const int chunk = blockIdx.x % inverse.chunks;
  const tile::Sequence sequence = tile::make_sequence<features>(args, static_cast<int>(plane / args.list_heads));
  const int in_use = tile::ceil_div(sequence.len_q, args.list_block_q);
  const int limit = tile::ceil_div(sequence.len_kv, args.list_block_kv);
  const int of_chunk = tile::ceil_div(inverse.list_rows, inverse.chunks);
  const int end = tile::min((chunk + 1) * of_chunk, in_use);
#pragma unroll 1
  for (int row = chunk * of_chunk; row < end; ++row) {
    const tile::KeyListView list(args, sequence, features.packed, row, static_cast<int>(plane % args.list_heads));
#pragma unroll 1
    for (int e = threadIdx.x; e < list.count; e += tile::product_threads) {
      const int unit = list.template entry<features.key_set>(e, limit);
      if (unit >= 0) visit(row, unit);
    }
    __syncthreads();  // a list is done before the next begins, so the numbers are in the order of the lists
  }
}

template <BackwardConfig config>
__device__ __forceinline__ void backward_listed_count(const AttentionArgs& args) {
  const InverseLists inverse(args);
  unsigned* const counts = inverse.counts(args, blockIdx.x / inverse.chunks) +
                           blockIdx.x % inverse.chunks * static_cast<long long>(inverse.key_units);
#pragma unroll 1
  for (int unit = threadIdx.x; unit < inverse.key_units; unit += tile::product_threads) counts[unit] = 0;
  __syncthreads();  // the counts are 0
  for_entries<config.features>(args, inverse, [&](int, int unit) { ptx::atomic_add(counts + unit, 1u); });
}

struct OffsetStorage {
  unsigned total[tile::product_threads / 32];
};

template <BackwardConfig config>
__device__ __forceinline__ void backward_listed_offsets(const AttentionArgs& args) {
  const InverseLists inverse(args);
  auto& storage = ptx::shared_storage<OffsetStorage>();
  unsigned* const counts = inverse.counts(args, blockIdx.x);
  unsigned* const begins = inverse.begins(args, blockIdx.x);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  unsigned before = 0;  // the numbers of all blocks of keys before these
#pragma unroll 1
  for (int first = 0; first < inverse.key_units; first += tile::product_threads) {
    const int unit = first + threadIdx.x;
    unsigned own = 0;
    for (int chunk = 0; chunk < inverse.chunks && unit < inverse.key_units; ++chunk)
      own += counts[static_cast<long long>(chunk) * inverse.key_units + unit];
    unsigned sum = own;  // with those of lower lanes
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const unsigned other = ptx::shuffle_up(sum, step);
      if (lane >= step) sum += other;
    }
    __syncthreads();  // the totals of the step before have been read
    if (lane == 31) storage.total[warp] = sum;
    __syncthreads();  // the totals are written
    unsigned begin = before + sum - own;
    for (int w = 0; w < tile::product_threads / 32; ++w) {
      if (w < warp) begin += storage.total[w];
      before += storage.total[w];
    }
    if (unit < inverse.key_units) {
      begins[unit] = begin;
      for (int chunk = 0; chunk < inverse.chunks; ++chunk) {
        unsigned& count = counts[static_cast<long long>(chunk) * inverse.key_units + unit];
        const unsigned of_chunk = count;
        count = begin;
        begin += of_chunk;
      }
    }
  }
  if (threadIdx.x == 0) begins[inverse.key_units] = before;
}

template <BackwardConfig config>
__device__ __forceinline__ void backward_listed_fill(const AttentionArgs& args) {
  const InverseLists inverse(args);
  const long long plane = blockIdx.x / inverse.chunks;
  unsigned* const next =
      inverse.counts(args, plane) + blockIdx.x % inverse.chunks * static_cast<long long>(inverse.key_units);
  int* const lists = inverse.lists(args, plane);
  for_entries<config.features>(args, inverse, [&](int row, int unit) { lists[ptx::atomic_add(next + unit, 1u)] = row; });
}

/// Computes dK and dV of one key of one key head.
template <BackwardConfig config>
__device__ __forceinline__ void backward_listed_dkv(const AttentionArgs& args) {
  using Kernel = BackwardListed<config>;
  using Element = typename Kernel::Element;
  constexpr Features features = config.features;
  constexpr int dim = config.head_dim, dim_v = config.head_dim_v, warps = tile::product_threads / 32;
  constexpr int columns = tile::ceil_div(dim, 32), columns_v = tile::ceil_div(dim_v, 32);  // of a lane
  struct Storage {
    float sums[warps][32 * (columns + columns_v)];
  };
  auto& storage = ptx::shared_storage<Storage>();

  const int j = blockIdx.x % args.seq_kv, rest = blockIdx.x / args.seq_kv;
  const int kv_head_idx = rest % args.heads_kv;
  const tile::Sequence sequence = tile::make_sequence<features>(args, rest / args.heads_kv);
  if (j >= sequence.rows_kv) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto K = tile::key_rows<const Element, features>(args.K, sequence, kv_head_idx);
  const auto V = tile::key_rows<const Element, features>(args.V, sequence, kv_head_idx);
  const auto load = [&](const Element* row, int width, int c) {
    const int column = 32 * c + lane;
    return column < width ? ptx::to_float(row[column]) : 0.0f;
  };

  float dK[columns]{}, dV[columns_v]{};
  if (j < sequence.visible_kv) {
    const InverseLists inverse(args);
    const tile::ListShape shape(args);
    const auto* delta = tile::workspace<const float>(args, BackwardRegion::delta);
    float k[columns], v[columns_v];
#pragma unroll
    for (int c = 0; c < columns; ++c) k[c] = load(K.row(j), dim, c);
#pragma unroll
    for (int c = 0; c < columns_v; ++c) v[c] = load(V.row(j), dim_v, c);
    const int per_key_head = shape.heads / args.heads_kv;  // 1, or the query heads of a key head
#pragma unroll 1
    for (int n = 0; n < per_key_head; ++n) {
      const int list_head = kv_head_idx * per_key_head + n;
      const long long plane = static_cast<long long>(sequence.batch_idx) * args.list_heads + list_head * shape.own_heads;
      const unsigned* begins = inverse.begins(args, plane) + j / args.list_block_kv;
      const int* lists = inverse.lists(args, plane);
      const int rows_of_list = args.list_block_q * shape.stacked;
      const long long first = begins[0] * static_cast<long long>(rows_of_list);
      const long long last = begins[1] * static_cast<long long>(rows_of_list);
#pragma unroll 1
      for (long long at = first + warp; at < last; at += warps) {
        const tile::ListRows rows{lists[at / rows_of_list] * args.list_block_q, list_head * shape.stacked, shape.stacked, 0,
                                  0};
        const int row = static_cast<int>(at % rows_of_list), i = rows.query(row), head = rows.head(row);
        const tile::Score<features> score(args, sequence, head);
        if (i >= sequence.len_q || !score.sight.visible(i, j)) continue;
        ptx::path<"backward/listed key">();
        const auto* q_row = tile::query_rows<const Element, features>(args.Q, sequence, head).row(i);
        const auto* dO_row = tile::query_rows<const Element, features>(args.dO, sequence, head).row(i);
        float dot = 0, dp = 0;
#pragma unroll
        for (int c = 0; c < columns; ++c) dot += load(q_row, dim, c) * k[c];
#pragma unroll
        for (int c = 0; c < columns_v; ++c) dp += load(dO_row, dim_v, c) * v[c];
#pragma unroll
        for (int mask = 1; mask < 32; mask *= 2) {
          dot += ptx::shuffle_xor(dot, mask);
          dp += ptx::shuffle_xor(dp, mask);
        }
        const long long statistics = tile::statistics_offset<features>(args, sequence, head) + i;
        const typename Kernel::Gradient gradient(args, sequence, score, head, i, j, dot, dp, args.lse[statistics],
                                                 delta[statistics]);
#pragma unroll
        for (int c = 0; c < columns; ++c) dK[c] += gradient.ds * load(q_row, dim, c);
        if (gradient.dropped) continue;
#pragma unroll
        for (int c = 0; c < columns_v; ++c) dV[c] += gradient.p * load(dO_row, dim_v, c);
      }
    }
  }
#pragma unroll
  for (int c = 0; c < columns; ++c) storage.sums[warp][32 * c + lane] = dK[c];
#pragma unroll
  for (int c = 0; c < columns_v; ++c) storage.sums[warp][32 * (columns + c) + lane] = dV[c];
  __syncthreads();  // the sums of all warps are written
  auto* const dK_row = tile::key_rows<Element, features>(args.dK, sequence, kv_head_idx).row(j);
  auto* const dV_row = tile::key_rows<Element, features>(args.dV, sequence, kv_head_idx).row(j);
#pragma unroll 1
  for (int column = threadIdx.x; column < dim + dim_v; column += tile::product_threads) {
    const bool of_key = column < dim;
    const int at = of_key ? column : 32 * columns + column - dim;
    float sum = 0;
    for (int w = 0; w < warps; ++w) sum += storage.sums[w][at];
    if (of_key) dK_row[column] = ptx::from_float<Element>(sum * args.scale);
    if (!of_key) dV_row[column - dim] = ptx::from_float<Element>(sum);
  }
}

}  // namespace flash_attention
