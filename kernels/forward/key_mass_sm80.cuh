#pragma once

// Key masses (forward/key_mass.cuh) with mma.sync and cp.async: sm_80 and up, 16-bit types.
//
// A thread block owns block_kv keys of a query head, 16 or 32 a warp. Their K stays in registers as the A operand.
// Queries arrive in tiles of block_q, two in flight:
//
//   for each tile of queries that see some of the keys:
//     prefetch the next;  wait for this one
//     S = K Q^T                      rows are keys: four lanes hold a key's sum, and exchange nothing until the end
//     mass[key] += 2^(S - lse)
//
// Each block adds in a fixed order, so every run has the same bits.

#include "ptx/math.cuh"
#include "ptx/path.cuh"
#include "ptx/registers.cuh"
#include "ptx/shared.cuh"
#include "tile/copy.cuh"
#include "tile/mma.cuh"
#include "tile/score.cuh"
#include "tile/softmax.cuh"
#include "tile/swizzle.cuh"
#include "tile/tail.cuh"

namespace flash_attention {

using namespace abi;

/// mass += 2^(S - lse). Rows are keys: this thread's first one is `key`, and its other tiles are `tile_rows` apart. Columns
/// are queries from `query` on, of which this thread's first is `column`.
template <bool some_hidden, int tile_rows, Features features, int tiles, int blocks>
__device__ __forceinline__ void add_masses(float (&mass)[tiles][2], const float (&S)[tiles][blocks][4],
                                           const tile::Score<features>& score, const float* minus_lse, int query, int key,
                                           int column) {
  const float scale_log2 = score.unit_scale() * tile::log2_e;
#pragma unroll
  for (int n = 0; n < blocks; ++n) {
    const int first = some_hidden ? ptx::hide_from_compiler(query) : query;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int i = first + 8 * n + column + c, existing = tile::min(i, score.sight.len_q - 1);
      const float of_row = minus_lse[8 * n + column + c];
      const tile::KeyRange range = some_hidden ? score.sight.keys_of(i) : tile::KeyRange{};
#pragma unroll
      for (int m = 0; m < tiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int j = key + tile_rows * m + 8 * half;
          const float dot = S[m][n][2 * half + c];
          float p = 0;
          if (!some_hidden || score.sight.visible(range, i, j)) {
            const float units = tile::Score<features>::linear ? dot : score.in_units(dot, existing, j);
            p = ptx::exp2(ptx::fma(units, scale_log2, of_row));
            // A score of -inf is hidden, whatever the row's lse.
            if (!tile::Score<features>::linear && units == -tile::infinity) p = 0;
          }
          mass[m][half] += p;
        }
      }
    }
  }
}

/// -lse of a query in powers of two; -inf for one that has no probabilities or does not exist.
__device__ __forceinline__ float minus_lse_of(const float* lse, int i, int len_q) {
  if (i >= len_q) return -tile::infinity;
  return lse[i] < tile::lowest_lse ? -tile::infinity : -lse[i] * tile::log2_e;
}

template <ForwardConfig config>
struct KeyMassSm80 {
  static constexpr Features features = config.features;
  static constexpr Type type = features.dtype;
  static constexpr int block_q = config.block_q, block_kv = config.block_kv, threads = 32 * config.num_warps;
  static constexpr int dim = tile::round_up(config.head_dim, 16), steps = dim / 16;
  static constexpr int keys_per_warp = block_kv / config.num_warps, m_tiles = keys_per_warp / 16;
  using Element = ptx::Element<type>;
  using KTile = tile::SwizzledTile<block_kv, dim>;
  using QTile = tile::SwizzledTile<block_q, dim>;
  using Scores = float[m_tiles][2][4];  // of 16 queries
  static_assert(keys_per_warp % 16 == 0 && block_q % 16 == 0 && block_q <= threads);

  struct SharedStorage {
    KTile K;
    QTile Q[2];
    float minus_lse[2][block_q];  // in powers of two; -inf for a row that has no probabilities
  };

  const AttentionArgs& args;
  SharedStorage& storage;
  const tile::Sequence sequence;
  const int head_idx, kv_begin;
  const int thread = threadIdx.x, lane = threadIdx.x % 32;
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * keys_per_warp;
  const tile::LanePlace place{lane};
  const tile::Score<features> score;
  const float* const lse;

  unsigned K[m_tiles][steps][4];
  float mass[m_tiles][2]{};

  __device__ __forceinline__ KeyMassSm80(const AttentionArgs& arguments, SharedStorage& shared, const tile::Sequence& s,
                                         int head, int first_key)
      : args(arguments),
        storage(shared),
        sequence(s),
        head_idx(head),
        kv_begin(first_key),
        score(arguments, s, head),
        lse(arguments.lse + tile::statistics_offset<features>(arguments, s, head)) {}

  __device__ __forceinline__ void load_K() {
    auto from = tile::key_rows<const Element, features>(args.K, sequence, head_idx / args.group);
    from.count = sequence.visible_kv;
    tile::copy_tile_async<threads, config.head_dim, KTile>(ptx::shared_address(&storage.K), from.from(kv_begin), thread);
  }
  __device__ __forceinline__ void load_Q(int tile_idx, int stage) {
    auto from = tile::query_rows<const Element, features>(args.Q, sequence, head_idx);
    from.count = sequence.len_q;
    tile::copy_tile_async<threads, config.head_dim, QTile>(ptx::shared_address(&storage.Q[stage]),
                                                           from.from(tile_idx * block_q), thread);
  }
  /// -lse of the thread's query of a tile.
  __device__ __forceinline__ float minus_lse_in(int tile_idx) const {
    return minus_lse_of(lse, thread < block_q ? tile_idx * block_q + thread : score.sight.len_q, score.sight.len_q);
  }

  __device__ __forceinline__ void keep_K() {
    const unsigned address = tile::a_address<KTile>(ptx::shared_address(&storage.K), warp_row, lane);
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
      for (int step = 0; step < steps; ++step)
        ptx::ldmatrix_x4(K[m][step], KTile::step(address, 2 * step) + m * 16 * 128);
    }
  }

  /// S = K Q^T of the queries [first, first + 16) of a tile.
  __device__ __forceinline__ void multiply(Scores& S, unsigned Q_address, int first) const {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
      for (int e = 0; e < 8; ++e) S[m][e / 4][e % 4] = 0;
    }
    tile::multiply<type, steps>(
        S,
        [&](unsigned(&A)[4], int m, int step) {
#pragma unroll
          for (int e = 0; e < 4; ++e) A[e] = K[m][step][e];
        },
        [&](unsigned(&B)[4], int, int step) { ptx::ldmatrix_x4(B, QTile::step(Q_address, 2 * step) + first * 128); });
  }

  /// Adds one tile of queries. The products of 16 queries run while the sums of the 16 before them are added.
  template <bool some_hidden>
  __device__ __forceinline__ void add_tile(int q_begin, int stage) {
    const unsigned address =
        tile::b_transposed_address<QTile>(ptx::shared_address(&storage.Q[stage]), 0, ptx::hide_from_compiler(lane));
    Scores S[2];
    multiply(S[0], address, 0);
#pragma unroll
    for (int first = 0; first < block_q; first += 16) {
      if (first + 16 < block_q) multiply(S[(first / 16 + 1) % 2], address, first + 16);
      add<some_hidden>(S[first / 16 % 2], q_begin, first, stage);
    }
  }

  /// mass += 2^(S - lse).
  template <bool some_hidden>
  __device__ __forceinline__ void add(const Scores& S, int q_begin, int first, int stage) {
    add_masses<some_hidden, 16>(mass, S, score, storage.minus_lse[stage] + first, q_begin + first,
                                kv_begin + warp_row + place.row, place.column);
  }

  /// The next tile of queries that see some of the keys, from tile_idx on; or tiles.end.
  __device__ __forceinline__ int visible_tile(int tile_idx, const tile::TileRange& tiles) const {
    if constexpr (tile::Visibility<features>::skips_tiles) {
      while (tile_idx < tiles.end && score.sight.template masks_hide<block_q, block_kv>(tile_idx * block_q, kv_begin))
        ++tile_idx;
    }
    return tile_idx;
  }

  __device__ __forceinline__ void attend(const tile::TileRange& tiles) {
    int tile_idx = visible_tile(tiles.begin, tiles);
    if (tile_idx >= tiles.end) return;
    load_K();
    load_Q(tile_idx, 0);
    ptx::copy_async_commit();
    if (thread < block_q) storage.minus_lse[0][thread] = minus_lse_in(tile_idx);
    ptx::copy_async_wait<0>();
    __syncthreads();  // K, the first queries and their lse have landed
    keep_K();
#pragma unroll 1
    for (int stage = 0; tile_idx < tiles.end; stage ^= 1) {
      const int next_idx = visible_tile(tile_idx + 1, tiles);
      float next_lse = 0;
      if (next_idx < tiles.end) {
        load_Q(next_idx, stage ^ 1);
        next_lse = minus_lse_in(next_idx);
      }
      ptx::copy_async_commit();
      const int q_begin = tile_idx * block_q;
      if (score.sight.template all_visible<block_q, block_kv>(q_begin, kv_begin)) {
        ptx::path<"forward/key_mass_sm80 inner tile">();
        add_tile<false>(q_begin, stage);
      } else {
        ptx::path<"forward/key_mass_sm80 edge tile">();
        add_tile<true>(q_begin, stage);
      }
      if (thread < block_q) storage.minus_lse[stage ^ 1][thread] = next_lse;
      ptx::copy_async_wait<0>();
      __syncthreads();  // the next queries have landed, and every warp is done with these
      tile_idx = next_idx;
    }
  }

  __device__ __forceinline__ void write() const {
    float* const to = args.key_mass + tile::key_mass_offset<features>(args, sequence, head_idx);
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float sum = tile::reduce_quad(mass[m][half], [](float a, float b) { return a + b; });
        const int j = kv_begin + warp_row + 16 * m + place.row + 8 * half;
        if (place.column == 0 && j < sequence.rows_kv) to[j] = sum;
      }
    }
  }
};

template <ForwardConfig config>
__device__ __forceinline__ void forward_key_mass_sm80(const AttentionArgs& args) {
  using Kernel = KeyMassSm80<config>;
  auto& storage = ptx::shared_storage<typename Kernel::SharedStorage>();
  tile::clear_key_mass_tail<config>(args, threadIdx.x, Kernel::threads);
  const auto block = tile::key_block(blockIdx.x, tile::ceil_div(args.seq_kv, config.block_kv), args.heads_q);
  const tile::Sequence sequence = tile::make_sequence<config.features>(args, block.batch_idx);
  const int kv_begin = block.tile_idx * config.block_kv;
  if (kv_begin >= sequence.rows_kv) return;
  Kernel kernel(args, storage, sequence, block.head_idx, kv_begin);
  const auto tiles = kernel.score.sight.template query_tiles<config.block_q, config.block_kv>(kv_begin);
  if (tiles.begin < tiles.end) kernel.attend(tiles);
  kernel.write();
}

}  // namespace flash_attention
