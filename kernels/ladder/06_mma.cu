#pragma once

// The idea:  mma.sync says which lane holds which element, so S becomes P in registers and O stays there.
// From 05:   ldmatrix and mma.sync instead of WMMA; softmax on fragments (tile/softmax.cuh); S, P and P V leave memory.
// It buys:   no copies of S, P and P V in shared memory, and tiles of twice as many keys in the room they leave.
// The limit: bank conflicts: ldmatrix reads eight rows of a tile at once, and all of them begin in the same bank.

#include "ptx/memory.cuh"
#include "tile/mma.cuh"
#include "tile/sequence.cuh"
#include "tile/softmax.cuh"

namespace flash_attention {

using namespace abi;

/// Whether query i sees key j: every key or, under a causal mask, those up to the diagonal, which ends in the last corner.
template <Features features>
__device__ __forceinline__ bool visible(const AttentionArgs& args, int i, int j) {
  const int last = features.window_right ? i + args.seq_kv - args.seq_q : args.seq_kv - 1;
  return j <= last && j < args.seq_kv;
}

/// A tile of 16-bit elements in shared memory, row after row.
template <int num_rows, int num_columns>
struct PlainTile {
  static constexpr int rows = num_rows, columns = num_columns;
  alignas(16) unsigned char bytes[rows * columns * 2];

  /// Where chunk `chunk` (eight elements) of a row lies, in bytes from the start.
  __device__ static constexpr unsigned offset(int row, int chunk) { return row * columns * 2 + chunk * 16; }
  /// From the address of a chunk to that `chunks` further on.
  __device__ static constexpr unsigned step(unsigned address, int chunks) { return address + chunks * 16; }
};

/// Rows of a tensor to shared memory; rows that do not exist, and columns at or past head_dim, become zero.
template <int threads, int dim, typename Tile, typename Element>
__device__ __forceinline__ void load_tile(unsigned address, const tile::Rows<const Element>& from, int thread) {
  using Chunk = ptx::Vector<Element, 8>;
  constexpr int chunks = Tile::columns / 8;
  for (int index = thread; index < Tile::rows * chunks; index += threads) {
    const int row = index / chunks, chunk = index % chunks;
    Chunk values{};
    if (row < from.count && chunk * 8 < dim) {
      values = ptx::load_readonly(reinterpret_cast<const Chunk*>(from.row(row) + chunk * 8));
    }
    ptx::store_shared(address + Tile::offset(row, chunk), values);
  }
}

template <ForwardConfig config>
__device__ __forceinline__ void attention(const AttentionArgs& args) {
  constexpr Features features = config.features;
  constexpr Type type = features.dtype;
  constexpr int dim = tile::round_up(config.head_dim, 16), block_q = config.block_q, block_kv = config.block_kv;
  constexpr int threads = 32 * config.num_warps;
  using Element = ptx::Element<type>;
  using QTile = PlainTile<block_q, dim>;
  using KVTile = PlainTile<block_kv, dim>;
  struct SharedStorage {
    QTile Q;
    KVTile K, V;
  };
  static_assert(block_q == 16 * config.num_warps);
  auto& storage = ptx::shared_storage<SharedStorage>();
  const auto block = tile::query_block(blockIdx.x, tile::ceil_div(args.seq_q, block_q), args.heads_q);
  const int thread = threadIdx.x, lane = thread % 32, warp_row = thread / 32 * 16;
  const int q_begin = block.tile_idx * block_q;
  const tile::LanePlace place(lane);
  const unsigned Q_smem = ptx::shared_address(&storage.Q), K_smem = ptx::shared_address(&storage.K),
                 V_smem = ptx::shared_address(&storage.V);

  const tile::Sequence sequence = tile::make_sequence<features>(args, block.batch_idx);
  const auto Q_gmem = tile::query_rows<const Element, features>(args.Q, sequence, block.head_idx).from(q_begin);
  const auto K_gmem = tile::key_rows<const Element, features>(args.K, sequence, block.head_idx / args.group);
  const auto V_gmem = tile::key_rows<const Element, features>(args.V, sequence, block.head_idx / args.group);
  const auto O_gmem = tile::query_rows<Element, features>(args.O, sequence, block.head_idx).from(q_begin);

  tile::RowState rows;
  float O[1][dim / 8][4]{};
  const float scale_log2 = args.scale * tile::log2_e;
  load_tile<threads, config.head_dim, QTile>(Q_smem, Q_gmem, thread);
#pragma unroll 1
  for (int kv_begin = 0; kv_begin < args.seq_kv; kv_begin += block_kv) {
    __syncthreads();  // every warp is done with the previous tile
    load_tile<threads, config.head_dim, KVTile>(K_smem, K_gmem.from(kv_begin), thread);
    load_tile<threads, config.head_dim, KVTile>(V_smem, V_gmem.from(kv_begin), thread);
    __syncthreads();  // the tile is there for every warp

    // S = Q K^T
    float S[1][block_kv / 8][4]{};
    tile::multiply<type, dim / 16>(
        S,
        [&](unsigned(&A)[4], int, int step) {
          ptx::ldmatrix_x4(A, QTile::step(tile::a_address<QTile>(Q_smem, warp_row, lane), 2 * step));
        },
        [&](unsigned(&B)[4], int n, int step) {
          ptx::ldmatrix_x4(B, KVTile::step(tile::b_transposed_address<KVTile>(K_smem, 16 * n, lane), 2 * step));
        });
#pragma unroll
    for (int n = 0; n < block_kv / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = q_begin + warp_row + place.row + 8 * (e / 2), j = kv_begin + 8 * n + place.column + e % 2;
        if (!visible<features>(args, i, j)) S[0][n][e] = -tile::infinity;
      }
    }

    // P = exp(S - row_max), in the place of S
    float shrink[2];
    rows.update(S[0], scale_log2, shrink);

    // O = O * shrink + P V
#pragma unroll
    for (int n = 0; n < dim / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) O[0][n][e] *= shrink[e / 2];
    }
    tile::multiply<type, block_kv / 16>(
        O, [&](unsigned(&A)[4], int, int step) { tile::pack_a<type>(A, S[0][2 * step], S[0][2 * step + 1]); },
        [&](unsigned(&B)[4], int n, int step) {
          ptx::ldmatrix_x4_trans(B, KVTile::step(tile::b_address<KVTile>(V_smem, 16 * step, lane), 2 * n));
        });
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float lse;
    const float factor = rows.finish(half, scale_log2, -tile::infinity, lse);
    const int row = warp_row + place.row + 8 * half, i = q_begin + row;
    if (i >= args.seq_q) continue;
    if (args.lse != nullptr && place.column == 0) {
      ptx::store_global(args.lse + tile::statistics_offset<features>(args, sequence, block.head_idx) + i, lse);
    }
#pragma unroll
    for (int n = 0; n < config.head_dim / 8; ++n) {
      const unsigned pair = ptx::pack<type>(O[0][n][2 * half] * factor, O[0][n][2 * half + 1] * factor);
      ptx::store_global(reinterpret_cast<unsigned*>(O_gmem.row(row) + 8 * n + place.column), pair);
    }
  }
}

}  // namespace flash_attention
