#pragma once

// The idea:  what a thread knows, and what it does with it, in one struct: the state of a tile and the steps on it.
// From 10b:  the functions inside of the kernel become members, the variables that they share become fields.
// It buys:   nothing in time. From rung 13 on there are two kinds of warps, and each calls the members that it needs.
// The limit: as before: every thread computes addresses and issues copies between its products.

#include "ptx/memory.cuh"
#include "tile/copy.cuh"
#include "tile/mma.cuh"
#include "tile/softmax.cuh"
#include "tile/swizzle.cuh"
#include "tile/visibility.cuh"

namespace flash_attention {

using namespace abi;

template <ForwardConfig config>
struct Rung {
  static constexpr Features features = config.features;
  static constexpr Type type = features.dtype;
  using Element = ptx::Element<type>;
  static constexpr int dim = tile::round_up(config.head_dim, 16), block_q = config.block_q, block_kv = config.block_kv;
  static constexpr int threads = 32 * config.num_warps;
  // Tiles of shared memory; the swizzle keeps eight rows that are read together in different banks.
  using QTile = tile::SwizzledTile<block_q, dim>;
  using KTile = tile::SwizzledTile<block_kv, dim>;
  using VTile = tile::SwizzledTile<block_kv, dim>;
  struct SharedStorage {
    QTile Q;
    KTile K[2];
    VTile V[2];
  };
  // Of each 8 keys a lane has two neighbours in two rows.
  using Scores = float[1][block_kv / 8][4];

  const AttentionArgs& args;
  SharedStorage& storage;
  const tile::Sequence sequence;
  const int head_idx, q_begin;
  const int thread = threadIdx.x, lane = thread % 32, warp_row = thread / 32 * 16;
  const tile::LanePlace place{lane};
  const tile::Visibility<features> sight;
  // exp(x) is 2^(x log2 e): the hardware has 2^x, and the factor is folded into the scale.
  const float scale_log2 = args.scale * tile::log2_e;

  unsigned Q[dim / 16][4];
  float O[1][dim / 8][4]{};
  // The state of the loop: maximum and sum of two rows, and their output, in fp32.
  tile::RowState rows;

  __device__ __forceinline__ Rung(const AttentionArgs& arguments, SharedStorage& shared, const tile::Sequence& s, int head,
                                  int first_query)
      : args(arguments), storage(shared), sequence(s), head_idx(head), q_begin(first_query), sight(arguments, s, head) {}

  // -- loads: every thread copies its share ----------------------------------------------------------------------------

  /// Starts to copy the rows of `from` to a tile.
  template <typename Tile>
  __device__ __forceinline__ void load(Tile& to, const tile::Rows<const Element>& from) const {
    tile::copy_tile_async<threads, config.head_dim, Tile>(ptx::shared_address(&to), from, thread);
  }
  /// The queries of the block, for all warps.
  __device__ __forceinline__ void load_Q() const {
    const auto Q_gmem = tile::query_rows<const Element, features>(args.Q, sequence, head_idx);
    load(storage.Q, Q_gmem.from(q_begin));
    ptx::copy_async_commit();
  }
  /// K and V of a tile.
  __device__ __forceinline__ void load_keys(int tile_idx, int stage) const {
    const auto K_gmem = tile::key_rows<const Element, features>(args.K, sequence, head_idx / args.group);
    const auto V_gmem = tile::key_rows<const Element, features>(args.V, sequence, head_idx / args.group);
    load(storage.K[stage], K_gmem.from(tile_idx * block_kv));
    load(storage.V[stage], V_gmem.from(tile_idx * block_kv));
    ptx::copy_async_commit();
  }

  // -- products ---------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void keep_Q() {
    const unsigned Q_smem = ptx::shared_address(&storage.Q);
#pragma unroll
    for (int step = 0; step < dim / 16; ++step) {
      ptx::ldmatrix_x4(Q[step], QTile::step(tile::a_address<QTile>(Q_smem, warp_row, lane), 2 * step));
    }
  }

  /// S = Q K^T.
  __device__ __forceinline__ void multiply_keys(Scores& S, int stage) const {
    const unsigned K_smem = ptx::shared_address(&storage.K[stage]);
    // A: 16 rows of Q. B: 16 keys at a time; a row of K is a column of K^T, so nothing is transposed.
    tile::multiply<type, dim / 16>(
        S,
        [&](unsigned(&A)[4], int, int step) {
#pragma unroll
          for (int e = 0; e < 4; ++e) A[e] = Q[step][e];
        },
        [&](unsigned(&B)[4], int n, int step) {
          ptx::ldmatrix_x4(B, KTile::step(tile::b_transposed_address<KTile>(K_smem, 16 * n, lane), 2 * step));
        });
  }

  /// O += P V.
  __device__ __forceinline__ void add_values(const Scores& P, int stage) {
    const unsigned V_smem = ptx::shared_address(&storage.V[stage]);
    // A: P, packed to 16 bits in its registers. B: 16 rows of V, which ldmatrix transposes.
    tile::multiply<type, block_kv / 16>(
        O, [&](unsigned(&A)[4], int, int step) { tile::pack_a<type>(A, P[0][2 * step], P[0][2 * step + 1]); },
        [&](unsigned(&B)[4], int n, int step) {
          ptx::ldmatrix_x4_trans(B, VTile::step(tile::b_address<VTile>(V_smem, 16 * step, lane), 2 * n));
        });
  }

  // -- softmax ----------------------------------------------------------------------------------------------------------

  /// Sets the scores of hidden keys to -inf.
  __device__ __forceinline__ void mask(Scores& S, int kv_begin) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = q_begin + warp_row + place.row + 8 * half;
      const tile::KeyRange range = sight.keys_of(i);
#pragma unroll
      for (int n = 0; n < block_kv / 8; ++n) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          if (!sight.visible(range, i, kv_begin + 8 * n + place.column + e % 2)) S[0][n][e] = -tile::infinity;
        }
      }
    }
  }

  /// S becomes P; O must be multiplied by `rescale`.
  __device__ __forceinline__ void softmax(Scores& S, int kv_begin, float (&rescale)[2]) {
    if (!sight.template all_visible<block_q, block_kv>(q_begin, kv_begin)) mask(S, kv_begin);
    rows.update(S[0], scale_log2, rescale);
  }
  /// O was summed relative to the old maximum.
  __device__ __forceinline__ void rescale_O(const float (&rescale)[2]) {
#pragma unroll
    for (int n = 0; n < dim / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) O[0][n][e] *= rescale[e / 2];
    }
  }

  // -- the loop ---------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void attend(const tile::TileRange& tiles) {
    load_Q();
    load_keys(tiles.end - 1, 0);
    ptx::copy_async_wait<1>();  // the queries have landed
    __syncthreads();            // for every warp
    keep_Q();
#pragma unroll 1
    for (int n = 0; n < tiles.end - tiles.begin; ++n) {
      const int tile_idx = tiles.end - 1 - n, stage = n % 2;
      load_keys(tile::max(tile_idx - 1, tiles.begin), 1 - stage);  // at the last tile a copy that is not read
      Scores S{};
      float rescale[2];
      ptx::copy_async_wait<1>();  // K and V have landed
      __syncthreads();            // for every warp
      multiply_keys(S, stage);
      softmax(S, tile_idx * block_kv, rescale);
      rescale_O(rescale);
      add_values(S, stage);
      __syncthreads();  // every warp is done with this stage: the next step may fill it
    }
    ptx::copy_async_wait<0>();
  }

  /// Writes lse, and O through the warp's own rows of shared memory.
  __device__ __forceinline__ void finish() {
    const unsigned Q_smem = ptx::shared_address(&storage.Q);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + place.row + 8 * half, i = q_begin + row;
      float lse;
      const float factor = rows.finish(half, scale_log2, -tile::infinity, lse);
      // Four lanes hold a row: one of them writes its lse.
      if (args.lse != nullptr && place.column == 0 && i < sequence.rows_q) {
        args.lse[tile::statistics_offset<features>(args, sequence, head_idx) + i] = lse;
      }
#pragma unroll
      for (int n = 0; n < dim / 8; ++n) {
        // Two neighbours of a row, rounded, fill one register.
        ptx::store_shared(Q_smem + QTile::offset(row, n) + 2 * place.column,
                          ptx::pack<type>(O[0][n][2 * half] * factor, O[0][n][2 * half + 1] * factor));
      }
    }
    __syncwarp();  // the warp's rows of O are in shared memory
    const auto O_gmem = tile::query_rows<Element, features>(args.O, sequence, head_idx).from(q_begin);
    tile::store_tile<32, config.head_dim, 16, QTile>(Q_smem, warp_row, O_gmem, lane);
  }
};

template <ForwardConfig config>
__device__ __forceinline__ void attention(const AttentionArgs& args) {
  using Kernel = Rung<config>;
  auto& storage = ptx::shared_storage<typename Kernel::SharedStorage>();
  // The tile of queries, the head and the sequence that this block computes.
  const auto block = tile::query_block(blockIdx.x, tile::ceil_div(args.seq_q, config.block_q), args.heads_q);
  const tile::Sequence sequence = tile::make_sequence<config.features>(args, block.batch_idx);
  const int q_begin = block.tile_idx * config.block_q;
  Kernel kernel(args, storage, sequence, block.head_idx, q_begin);
  // Tiles of keys that some query of the block sees.
  const auto tiles = kernel.sight.template key_tiles<config.block_q, config.block_kv>(q_begin);
  if (tiles.begin < tiles.end) kernel.attend(tiles);
  kernel.finish();
}

}  // namespace flash_attention
