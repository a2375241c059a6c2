#pragma once

// The idea:  four warps share the tiles of K and V: a copy serves 64 rows, and while one warp waits another computes.
// From 04:   a block has 64 rows, 16 for each warp; barriers of the block around the copies, of the warp for the rest.
// It buys:   a quarter of the traffic at L2, and other warps that compute while one waits.
// The limit: shared memory: S, P and P V go through it only because it is not defined where WMMA keeps their elements.

#include "ladder/parts/float_tile.cuh"
#include "ladder/parts/half_tile.cuh"
#include "ladder/parts/warp.cuh"
#include "ptx/convert.cuh"
#include "ptx/wmma.cuh"
#include "tile/sequence.cuh"

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
  alignas(32) float S[block_q][block_kv + 4];
  alignas(32) Element P[block_q][block_kv + 8];
  alignas(32) float PV[block_q][dim + 4];
};

template <ForwardConfig config>
__device__ __forceinline__ void attention(const AttentionArgs& args) {
  constexpr Features features = config.features;
  constexpr Type type = features.dtype;
  constexpr int dim = tile::round_up(config.head_dim, 16), block_q = config.block_q, block_kv = config.block_kv;
  constexpr int threads = 32 * config.num_warps, rows = 16;
  using Element = ptx::Element<type>;
  static_assert(block_q == rows * config.num_warps && block_kv == 32 && dim <= 128, "a lane has one key and four columns");
  auto& storage = ptx::shared_storage<SharedStorage<Element, dim, block_q, block_kv>>();
  // The tile of queries, the head and the sequence that this block computes.
  const auto block = tile::query_block(blockIdx.x, tile::ceil_div(args.seq_q, block_q), args.heads_q);
  const int lane = threadIdx.x % 32, warp_row = static_cast<int>(threadIdx.x) / 32 * rows, column = 4 * lane;
  const int q_begin = block.tile_idx * block_q;

  const tile::Sequence sequence = tile::make_sequence<features>(args, block.batch_idx);
  // Rows of this head in global memory. Several query heads may share a head of keys and values.
  const auto Q_gmem = tile::query_rows<const Element, features>(args.Q, sequence, block.head_idx).from(q_begin);
  const auto K_gmem = tile::key_rows<const Element, features>(args.K, sequence, block.head_idx / args.group);
  const auto V_gmem = tile::key_rows<const Element, features>(args.V, sequence, block.head_idx / args.group);
  const auto O_gmem = tile::query_rows<Element, features>(args.O, sequence, block.head_idx).from(q_begin);

  // Softmax so far: the largest score, and the sum of exp(score - row_max).
  float row_max[rows], row_sum[rows]{};
  // A lane sums four columns of each row of its warp.
  tile::Four O[rows]{};
#pragma unroll
  for (int r = 0; r < rows; ++r) row_max[r] = -tile::infinity;
  load_tile<threads, config.head_dim>(storage.Q, Q_gmem);
  for (int kv_begin = 0; kv_begin < args.seq_kv; kv_begin += block_kv) {
    __syncthreads();  // every warp is done with the previous tile
    load_tile<threads, config.head_dim>(storage.K, K_gmem.from(kv_begin));
    load_tile<threads, config.head_dim>(storage.V, V_gmem.from(kv_begin));
    __syncthreads();  // the tile is visible to every warp

    // S = Q K^T: 16 columns of both at a time.
    ptx::WmmaAccumulator S_tile[block_kv / 16]{};
#pragma unroll
    for (int d = 0; d < dim; d += 16) {
      ptx::WmmaOperand<type> A, B;
      ptx::wmma_load_a<type>(A, ptx::shared_address(&storage.Q[warp_row][d]), dim);
#pragma unroll
      for (int n = 0; n < block_kv / 16; ++n) {
        ptx::wmma_load_b_transposed<type>(B, ptx::shared_address(&storage.K[16 * n][d]), dim);
        ptx::wmma_multiply<type, true>(S_tile[n], A, B);
      }
    }
#pragma unroll
    for (int n = 0; n < block_kv / 16; ++n) {
      ptx::wmma_store(ptx::shared_address(&storage.S[warp_row][16 * n]), S_tile[n], block_kv + 4);
    }
    __syncwarp();  // S is visible to every lane

    // Softmax: a lane takes one key of every row.
    float rescale[rows];
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      float S = ptx::load_shared<float>(ptx::shared_address(&storage.S[warp_row + r][lane]));
      S = visible<features>(args, q_begin + warp_row + r, kv_begin + lane) ? S * args.scale : -tile::infinity;
      // Everything so far was summed relative to row_max. A larger maximum rescales it all by the same factor.
      const float new_max = ptx::max(row_max[r], warp_max(S));
      const float reference = new_max == -tile::infinity ? 0 : new_max;  // a row that has seen nothing: exp(-inf - 0) = 0
      rescale[r] = tile::exp(row_max[r] - reference);
      const float P = tile::exp(S - reference);
      row_max[r] = new_max;
      row_sum[r] = ptx::fma(row_sum[r], rescale[r], P);  // of the lane's keys
      ptx::store_shared(ptx::shared_address(&storage.P[warp_row + r][lane]), ptx::from_float<Element>(P));
    }
    __syncwarp();  // P is visible to every lane

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
#pragma unroll
        for (int c = 0; c < 4; ++c) O[r][c] = ptx::fma(O[r][c], rescale[r], PV[c]);
      }
    }
  }

#pragma unroll
  for (int r = 0; r < rows; ++r) {
    const int i = q_begin + warp_row + r;
    if (i >= args.seq_q) continue;
    // Until here each lane has summed its own keys only.
    const float sum = warp_sum(row_sum[r]);
    const float factor = sum == 0 ? 0 : 1 / sum;
    if (column < config.head_dim) store_four(O_gmem.row(warp_row + r) + column, O[r], factor);
    // The log-sum-exp of the row, which the backward pass needs.
    if (args.lse != nullptr && lane == 0) {
      float* lse = args.lse + tile::statistics_offset<features>(args, sequence, block.head_idx) + i;
      ptx::store_global(lse, sum == 0 ? -tile::infinity : row_max[r] + tile::log(sum));
    }
  }
}

}  // namespace flash_attention
