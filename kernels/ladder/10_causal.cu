#pragma once

// The idea:  a tile that no query of the block sees is not touched, and only tiles that the mask cuts are masked.
// From 09:   tile::Visibility knows which tiles a block sees and whether it sees all of one; the loop and the mask use it.
// It buys:   half of the work under a causal mask, and a loop without tests.
// The limit: one warp's softmax runs between its products: tensor cores idle meanwhile. Hopper's rungs go on from here.

#include "ptx/memory.cuh"
#include "tile/copy.cuh"
#include "tile/mma.cuh"
#include "tile/softmax.cuh"
#include "tile/swizzle.cuh"
#include "tile/visibility.cuh"

namespace flash_attention {

using namespace abi;

template <ForwardConfig config>
__device__ __forceinline__ void attention(const AttentionArgs& args) {
  constexpr Features features = config.features;
  constexpr Type type = features.dtype;
  constexpr int dim = tile::round_up(config.head_dim, 16), block_q = config.block_q, block_kv = config.block_kv;
  constexpr int threads = 32 * config.num_warps;
  using Element = ptx::Element<type>;
  // Tiles of shared memory; the swizzle keeps eight rows that are read together in different banks.
  using QTile = tile::SwizzledTile<block_q, dim>;
  using KVTile = tile::SwizzledTile<block_kv, dim>;
  struct SharedStorage {
    QTile Q;
    KVTile K[config.num_stages], V[config.num_stages];
  };
  static_assert(block_q == 16 * config.num_warps && config.num_stages == 2);
  auto& storage = ptx::shared_storage<SharedStorage>();
  // The tile of queries, the head and the sequence that this block computes.
  const auto block = tile::query_block(blockIdx.x, tile::ceil_div(args.seq_q, block_q), args.heads_q);
  const int thread = threadIdx.x, lane = thread % 32, warp_row = thread / 32 * 16;
  const int q_begin = block.tile_idx * block_q;
  const tile::LanePlace place(lane);
  const unsigned Q_smem = ptx::shared_address(&storage.Q), K_smem = ptx::shared_address(&storage.K),
                 V_smem = ptx::shared_address(&storage.V);

  const tile::Sequence sequence = tile::make_sequence<features>(args, block.batch_idx);
  // Rows of this head in global memory. Several query heads may share a head of keys and values.
  const auto Q_gmem = tile::query_rows<const Element, features>(args.Q, sequence, block.head_idx).from(q_begin);
  const auto K_gmem = tile::key_rows<const Element, features>(args.K, sequence, block.head_idx / args.group);
  const auto V_gmem = tile::key_rows<const Element, features>(args.V, sequence, block.head_idx / args.group);
  const auto O_gmem = tile::query_rows<Element, features>(args.O, sequence, block.head_idx).from(q_begin);

  // The state of the loop: maximum and sum of two rows, and their output, in fp32.
  tile::RowState rows;
  float O[1][dim / 8][4]{};
  // exp(x) is 2^(x log2 e): the hardware has 2^x, and the factor is folded into the scale.
  const float scale_log2 = args.scale * tile::log2_e;
  const tile::Visibility<features> sight(args, sequence, block.head_idx);
  // Tiles of keys that some query of the block sees.
  const auto tiles = sight.template key_tiles<block_q, block_kv>(q_begin);
  /// K and V of a tile.
  const auto load_keys = [&](int kv_begin) {
    const unsigned stage = kv_begin / block_kv % config.num_stages * sizeof(KVTile);
    tile::copy_tile_async<threads, config.head_dim, KVTile>(K_smem + stage, K_gmem.from(kv_begin), thread);
    tile::copy_tile_async<threads, config.head_dim, KVTile>(V_smem + stage, V_gmem.from(kv_begin), thread);
    ptx::copy_async_commit();
  };
  tile::copy_tile_async<threads, config.head_dim, QTile>(Q_smem, Q_gmem, thread);
  ptx::copy_async_commit();
  load_keys(tiles.begin * block_kv);
  ptx::copy_async_wait<1>();
  __syncthreads();  // Q is visible to every warp
  unsigned Q[dim / 16][4];
#pragma unroll
  for (int step = 0; step < dim / 16; ++step) {
    ptx::ldmatrix_x4(Q[step], QTile::step(tile::a_address<QTile>(Q_smem, warp_row, lane), 2 * step));
  }
  __syncwarp();  // every lane has read its rows of Q: O will take their place
#pragma unroll 1
  for (int tile_idx = tiles.begin; tile_idx < tiles.end; ++tile_idx) {
    const int kv_begin = tile_idx * block_kv;
    load_keys(kv_begin + block_kv);  // past the last tile: zeros that are not read
    ptx::copy_async_wait<1>();
    __syncthreads();  // the tile is visible to every warp
    const unsigned stage = kv_begin / block_kv % config.num_stages * sizeof(KVTile);

    // S = Q K^T
    float S[1][block_kv / 8][4]{};
    // A: 16 rows of Q. B: 16 keys at a time; a row of K is a column of K^T, so nothing is transposed.
    tile::multiply<type, dim / 16>(
        S,
        [&](unsigned(&A)[4], int, int step) {
#pragma unroll
          for (int e = 0; e < 4; ++e) A[e] = Q[step][e];
        },
        [&](unsigned(&B)[4], int n, int step) {
          ptx::ldmatrix_x4(B, KVTile::step(tile::b_transposed_address<KVTile>(K_smem + stage, 16 * n, lane), 2 * step));
        });
    if (!sight.template all_visible<block_q, block_kv>(q_begin, kv_begin)) {
#pragma unroll
      for (int n = 0; n < block_kv / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int i = q_begin + warp_row + place.row + 8 * (e / 2), j = kv_begin + 8 * n + place.column + e % 2;
          if (!sight.visible(i, j)) S[0][n][e] = -tile::infinity;
        }
      }
    }

    // P = exp(S - row_max), in place of S
    float rescale[2];
    rows.update(S[0], scale_log2, rescale);

    // O = O * rescale + P V
#pragma unroll
    for (int n = 0; n < dim / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) O[0][n][e] *= rescale[e / 2];
    }
    // A: P, packed to 16 bits in its registers. B: 16 rows of V, which ldmatrix transposes.
    tile::multiply<type, block_kv / 16>(
        O, [&](unsigned(&A)[4], int, int step) { tile::pack_a<type>(A, S[0][2 * step], S[0][2 * step + 1]); },
        [&](unsigned(&B)[4], int n, int step) {
          ptx::ldmatrix_x4_trans(B, KVTile::step(tile::b_address<KVTile>(V_smem + stage, 16 * step, lane), 2 * n));
        });
    __syncthreads();  // every warp is done with the tile
  }
  ptx::copy_async_wait<0>();

  // Only this warp has read its rows of Q, so its rows of O overwrite them.
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float lse;
    const float factor = rows.finish(half, scale_log2, -tile::infinity, lse);
    const int row = warp_row + place.row + 8 * half, i = q_begin + row;
    // Four lanes hold a row: one of them writes its lse.
    if (args.lse != nullptr && place.column == 0 && i < args.seq_q) {
      ptx::store_global(args.lse + tile::statistics_offset<features>(args, sequence, block.head_idx) + i, lse);
    }
#pragma unroll
    for (int n = 0; n < dim / 8; ++n) {
      // Two neighbours of a row, rounded, fill one register.
      const unsigned pair = ptx::pack<type>(O[0][n][2 * half] * factor, O[0][n][2 * half + 1] * factor);
      ptx::store_shared(Q_smem + QTile::offset(row, n) + 2 * place.column, pair);
    }
  }
  __syncwarp();  // the warp's rows of O are in shared memory
  tile::store_tile<32, config.head_dim, 16, QTile>(Q_smem, warp_row, O_gmem, lane);
}

}  // namespace flash_attention
