#pragma once

// The idea:  mma.sync says which lane holds which element of S: softmax works on them where they are, in registers.
// From 05:   Q K^T by ldmatrix and mma.sync, softmax by tile/softmax.cuh; P V stays with WMMA, through shared memory.
// It buys:   S no longer passes through shared memory; a row's maximum is two shuffles away, not five.
// The limit: shared memory: P and P V still pass through it, and with them what O is multiplied by.

#include "ladder/parts/float_tile.cuh"
#include "ladder/parts/half_tile.cuh"
#include "ptx/wmma.cuh"
#include "tile/mma.cuh"
#include "tile/sequence.cuh"
#include "tile/softmax.cuh"

namespace flash_attention {

using namespace abi;

/// Whether query i sees key j. Under a causal mask it sees keys up to the diagonal, which ends in the last corner.
template <Features features>
__device__ __forceinline__ bool visible(const AttentionArgs& args, int i, int j) {
  const int last = features.window_right ? i + args.seq_kv - args.seq_q : args.seq_kv - 1;
  return j <= last && j < args.seq_kv;
}

template <typename Element, int dim, int block_q, int block_kv>
struct SharedStorage {
  alignas(32) Element Q[block_q][dim];
  alignas(32) Element K[block_kv][dim];
  alignas(32) Element V[block_kv][dim];
  // Rows 16 bytes longer than their elements start in different banks.
  alignas(32) Element P[block_q][block_kv + 8];
  alignas(32) float PV[block_q][dim + 4];
  float rescale[block_q], factor[block_q];  // of each row: four lanes know it, all lanes need it for their columns of O
};

template <ForwardConfig config>
__device__ __forceinline__ void attention(const AttentionArgs& args) {
  constexpr Features features = config.features;
  constexpr Type type = features.dtype;
  constexpr int dim = tile::round_up(config.head_dim, 16), block_q = config.block_q, block_kv = config.block_kv;
  constexpr int threads = 32 * config.num_warps, rows = 16;
  using Element = ptx::Element<type>;
  using QTile = PlainTile<block_q, dim>;  // how the rows of Q and K are laid out, for ldmatrix
  using KVTile = PlainTile<block_kv, dim>;
  static_assert(block_q == rows * config.num_warps && block_kv == 32 && dim <= 128, "a lane has one key and four columns");
  auto& storage = ptx::shared_storage<SharedStorage<Element, dim, block_q, block_kv>>();
  // The tile of queries, the head and the sequence that this block computes.
  const auto block = tile::query_block(blockIdx.x, tile::ceil_div(args.seq_q, block_q), args.heads_q);
  const int lane = threadIdx.x % 32, warp_row = static_cast<int>(threadIdx.x) / 32 * rows, column = 4 * lane;
  const int q_begin = block.tile_idx * block_q;
  const tile::LanePlace place(lane);
  const unsigned Q_smem = ptx::shared_address(&storage.Q), K_smem = ptx::shared_address(&storage.K);

  const tile::Sequence sequence = tile::make_sequence<features>(args, block.batch_idx);
  // Rows of this head in global memory. Several query heads may share a head of keys and values.
  const auto Q_gmem = tile::query_rows<const Element, features>(args.Q, sequence, block.head_idx).from(q_begin);
  const auto K_gmem = tile::key_rows<const Element, features>(args.K, sequence, block.head_idx / args.group);
  const auto V_gmem = tile::key_rows<const Element, features>(args.V, sequence, block.head_idx / args.group);
  const auto O_gmem = tile::query_rows<Element, features>(args.O, sequence, block.head_idx).from(q_begin);

  // The state of the loop: maximum and sum of two rows, and their output, in fp32.
  tile::RowState state;
  // A lane sums four columns of each row of its warp.
  tile::Four O[rows]{};
  // exp(x) is 2^(x log2 e): the hardware has 2^x, and the factor is folded into the scale.
  const float scale_log2 = args.scale * tile::log2_e;
  load_tile<threads, config.head_dim>(storage.Q, Q_gmem);
  for (int kv_begin = 0; kv_begin < args.seq_kv; kv_begin += block_kv) {
    __syncthreads();  // every warp is done with the previous tile
    load_tile<threads, config.head_dim>(storage.K, K_gmem.from(kv_begin));
    load_tile<threads, config.head_dim>(storage.V, V_gmem.from(kv_begin));
    __syncthreads();  // the tile is visible to every warp

    // S = Q K^T
    float S[1][block_kv / 8][4]{};
    // A: 16 rows of Q. B: 16 keys at a time; a row of K is a column of K^T, so nothing is transposed.
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
        // Elements 0 and 1 are in row g of the warp, 2 and 3 in row g + 8.
        const int i = q_begin + warp_row + place.row + 8 * (e / 2), j = kv_begin + 8 * n + place.column + e % 2;
        if (!visible<features>(args, i, j)) S[0][n][e] = -tile::infinity;
      }
    }

    // P = exp(S - row_max), in place of S
    float rescale[2];
    state.update(S[0], scale_log2, rescale);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + place.row + 8 * half;
      if (place.column == 0) ptx::store_shared(ptx::shared_address(&storage.rescale[row]), rescale[half]);
#pragma unroll
      for (int n = 0; n < block_kv / 8; ++n) {
        ptx::store_shared(ptx::shared_address(&storage.P[row][8 * n + place.column]),
                          ptx::pack<type>(S[0][n][2 * half], S[0][n][2 * half + 1]));
      }
    }
    __syncwarp();  // P and rescale are visible to every lane

    // P V: 16 columns at a time.
    ptx::WmmaOperand<type> P_tile[block_kv / 16];
#pragma unroll
    for (int k = 0; k < block_kv / 16; ++k) {
      ptx::wmma_load_a<type>(P_tile[k], ptx::shared_address(&storage.P[warp_row][16 * k]), block_kv + 8);
    }
#pragma unroll
    for (int d = 0; d < dim; d += 16) {
      // The sum over the tile's keys of 16 columns, from 0: O is multiplied by rescale outside of it.
      ptx::WmmaAccumulator PV{};
#pragma unroll
      for (int k = 0; k < block_kv / 16; ++k) {
        ptx::WmmaOperand<type> B;
        ptx::wmma_load_b<type>(B, ptx::shared_address(&storage.V[16 * k][d]), dim);
        ptx::wmma_multiply<type, false>(PV, P_tile[k], B);
      }
      ptx::wmma_store(ptx::shared_address(&storage.PV[warp_row][d]), PV, dim + 4);
    }
    __syncwarp();  // P V is visible to every lane

    if (column < dim) {
#pragma unroll
      for (int r = 0; r < rows; ++r) {
        const auto PV = ptx::load_shared<tile::Four>(ptx::shared_address(&storage.PV[warp_row + r][column]));
        const auto factor = ptx::load_shared<float>(ptx::shared_address(&storage.rescale[warp_row + r]));
#pragma unroll
        for (int c = 0; c < 4; ++c) O[r][c] = ptx::fma(O[r][c], factor, PV[c]);
      }
    }
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float lse;
    const float factor = state.finish(half, scale_log2, -tile::infinity, lse);
    const int row = warp_row + place.row + 8 * half, i = q_begin + row;
    if (place.column == 0) ptx::store_shared(ptx::shared_address(&storage.factor[row]), factor);
    // Four lanes hold a row: one of them writes its lse.
    if (args.lse != nullptr && place.column == 0 && i < args.seq_q) {
      ptx::store_global(args.lse + tile::statistics_offset<features>(args, sequence, block.head_idx) + i, lse);
    }
  }
  __syncwarp();  // the factors are visible to every lane
#pragma unroll
  for (int r = 0; r < rows; ++r) {
    if (warp_row + r >= O_gmem.count || column >= config.head_dim) continue;
    const auto factor = ptx::load_shared<float>(ptx::shared_address(&storage.factor[warp_row + r]));
    store_four(O_gmem.row(warp_row + r) + column, O[r], factor);
  }
}

}  // namespace flash_attention
