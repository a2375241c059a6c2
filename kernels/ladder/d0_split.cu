#pragma once

// The idea:  one query has one tile of rows and a GPU a hundred SMs: blocks share its keys, and their results are merged.
// From 10:   a block takes a part of the tiles and leaves its output in fp32 with its lse; a second kernel merges them.
// It buys:   nothing if there are many queries (more bytes); with one query, every SM that had been idle.
// The limit: a tile of 64 rows holds one query of one head, and every head of a group reads the same keys for itself.

#include "ptx/memory.cuh"
#include "tile/copy.cuh"
#include "tile/mma.cuh"
#include "tile/softmax.cuh"
#include "tile/swizzle.cuh"
#include "tile/visibility.cuh"
#include "tile/workspace.cuh"

namespace flash_attention {

using namespace abi;

/// The results of the blocks of a query: outputs of its parts, fp32 [split, row, head_dim], and their lse [split, row].
/// A row is (batch, head, query).
struct Parts {
  float* O;
  float* lse;
  long long rows;

  __device__ __forceinline__ explicit Parts(const AttentionArgs& args)
      : O(tile::workspace<float>(args, LadderSplitRegion::O)),
        lse(tile::workspace<float>(args, LadderSplitRegion::lse)),
        rows(static_cast<long long>(args.batch) * args.heads_q * args.seq_q) {}
};

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
  // Neighbouring blocks take the parts of one tile of queries.
  const int split = static_cast<int>(blockIdx.x) % args.num_splits;
  const auto block = tile::query_block(blockIdx.x / args.num_splits, tile::ceil_div(args.seq_q, block_q), args.heads_q);
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

  // The state of the loop: maximum and sum of two rows, and their output, in fp32.
  tile::RowState rows;
  float O[1][dim / 8][4]{};
  // exp(x) is 2^(x log2 e): the hardware has 2^x, and the factor is folded into the scale.
  const float scale_log2 = args.scale * tile::log2_e;
  const tile::Visibility<features> sight(args, sequence, block.head_idx);
  auto tiles = sight.template key_tiles<block_q, block_kv>(q_begin);
  // This block's part of the tiles; the last parts may be empty.
  const int share = tile::ceil_div(tiles.end - tiles.begin, args.num_splits);
  tiles.begin = tile::min(tiles.begin + split * share, tiles.end);
  tiles.end = tile::min(tiles.begin + share, tiles.end);
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
          // Elements 0 and 1 are in row g of the warp, 2 and 3 in row g + 8.
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

  // The part's output in fp32: if it were rounded here, the error would be visible after the merge.
  const Parts parts(args);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float lse;
    const float factor = rows.finish(half, scale_log2, -tile::infinity, lse);
    const int i = q_begin + warp_row + place.row + 8 * half;
    if (i >= args.seq_q) continue;
    // The place of this part of the row in the workspace.
    const long long row = split * parts.rows + (block.batch_idx * args.heads_q + block.head_idx) * args.seq_q + i;
    if (place.column == 0) ptx::store_global(parts.lse + row, lse);
#pragma unroll
    for (int n = 0; n < dim / 8; ++n) {
      const int column = 8 * n + place.column;
      if (column >= config.head_dim) continue;
      ptx::store_global(parts.O + row * config.head_dim + column, O[0][n][2 * half] * factor);
      ptx::store_global(parts.O + row * config.head_dim + column + 1, O[0][n][2 * half + 1] * factor);
    }
  }
}

/// O = sum of exp(lse of the part - lse) * O of the part: a warp a row, a lane some columns.
template <ForwardConfig config>
__device__ __forceinline__ void merge(const AttentionArgs& args) {
  using Element = ptx::Element<config.features.dtype>;
  const Parts parts(args);
  const int lane = threadIdx.x % 32;
  const long long row = static_cast<long long>(blockIdx.x) * config.num_warps + threadIdx.x / 32;
  if (row >= parts.rows) return;
  // The weights of the parts, relative to the largest lse.
  float max = -tile::infinity, sum = 0;
  for (int split = 0; split < args.num_splits; ++split) max = ptx::max(max, parts.lse[split * parts.rows + row]);
  const float reference = max == -tile::infinity ? 0 : max;  // a row without keys: every weight is 0
  for (int split = 0; split < args.num_splits; ++split) {
    sum += ptx::exp2((parts.lse[split * parts.rows + row] - reference) * tile::log2_e);
  }
  // The query of the row, and the address of its output.
  const int i = static_cast<int>(row % args.seq_q), head = static_cast<int>(row / args.seq_q % args.heads_q);
  const int batch = static_cast<int>(row / args.seq_q / args.heads_q);
  Element* O =
      static_cast<Element*>(args.O.data) + batch * args.O.batch_stride + i * args.O.seq_stride + head * args.O.head_stride;
  for (int column = lane; column < config.head_dim; column += 32) {
    // A weighted mean of the parts' outputs.
    float value = 0;
    for (int split = 0; split < args.num_splits; ++split) {
      const float weight = ptx::exp2((parts.lse[split * parts.rows + row] - reference) * tile::log2_e);
      value = ptx::fma(weight, parts.O[(split * parts.rows + row) * config.head_dim + column], value);
    }
    O[column] = ptx::from_float<Element>(sum == 0 ? 0 : value / sum);
  }
  // The log-sum-exp of the row, which the backward pass needs.
  if (args.lse != nullptr && lane == 0) {
    args.lse[row] = sum == 0 ? -tile::infinity : max + ptx::log2(sum) * tile::ln_2;
  }
}

}  // namespace flash_attention
