#pragma once

// The idea:  a block keeps a tile of K and V in shared memory, and every value read from it serves four queries.
// From 02:   a warp takes four rows; a lane takes a key of the tile for S and four columns for O; softmax goes by tiles.
// It buys:   three times the speed: a quarter of the loads, and a softmax step for 32 keys instead of one.
// The limit: CUDA cores: even with all operands at hand they do a sixteenth of what the tensor cores do.

#include "ladder/parts/float_tile.cuh"
#include "ladder/parts/warp.cuh"
#include "tile/sequence.cuh"

namespace flash_attention {

using namespace abi;

/// Whether query i sees key j. Under a causal mask it sees keys up to the diagonal, which ends in the last corner.
template <Features features>
__device__ __forceinline__ bool visible(const AttentionArgs& args, int i, int j) {
  const int last = features.window_right ? i + args.seq_kv - args.seq_q : args.seq_kv - 1;
  return j <= last && j < args.seq_kv;
}

template <int dim, int block_q, int block_kv>
struct SharedStorage {
  alignas(16) float Q[block_q][dim];
  alignas(16) float K[block_kv][dim + 4];  // four more: the lanes read a column, and eight rows now start in all 32 banks
  alignas(16) float V[block_kv][dim];
  alignas(16) float P[block_q][block_kv];
};

template <ForwardConfig config>
__device__ __forceinline__ void attention(const AttentionArgs& args) {
  constexpr Features features = config.features;
  constexpr int dim = config.head_dim, block_q = config.block_q, block_kv = config.block_kv;
  constexpr int threads = 32 * config.num_warps, rows = block_q / config.num_warps;
  using Element = ptx::Element<features.dtype>;
  static_assert(block_kv == 32 && dim <= 128, "a lane has one key and four columns");
  auto& storage = ptx::shared_storage<SharedStorage<dim, block_q, block_kv>>();
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
  tile::Four O[rows]{};
#pragma unroll
  for (int r = 0; r < rows; ++r) row_max[r] = -tile::infinity;
  load_tile<threads, dim>(storage.Q, Q_gmem);
  for (int kv_begin = 0; kv_begin < args.seq_kv; kv_begin += block_kv) {
    __syncthreads();  // every warp is done with the previous tile
    load_tile<threads, dim>(storage.K, K_gmem.from(kv_begin));
    load_tile<threads, dim>(storage.V, V_gmem.from(kv_begin));
    __syncthreads();  // the tile is visible to every warp

    // S = Q K^T: the lane's key with every row of the warp.
    float S[rows]{};
#pragma unroll 4
    for (int d = 0; d < dim; d += 4) {
      const tile::Four k = load_four(storage.K[lane][d]);
#pragma unroll
      for (int r = 0; r < rows; ++r) {
        const tile::Four q = load_four(storage.Q[warp_row + r][d]);
#pragma unroll
        for (int c = 0; c < 4; ++c) S[r] = ptx::fma(q[c], k[c], S[r]);
      }
    }

#pragma unroll
    for (int r = 0; r < rows; ++r) {
      S[r] = visible<features>(args, q_begin + warp_row + r, kv_begin + lane) ? S[r] * args.scale : -tile::infinity;
      // Everything so far was summed relative to row_max. A larger maximum rescales it all by the same factor.
      const float new_max = ptx::max(row_max[r], warp_max(S[r]));
      const float reference = new_max == -tile::infinity ? 0 : new_max;  // a row that has seen nothing: exp(-inf - 0) = 0
      const float rescale = tile::exp(row_max[r] - reference);
      const float P = tile::exp(S[r] - reference);
      row_max[r] = new_max;
      row_sum[r] = ptx::fma(row_sum[r], rescale, P);  // of the lane's keys
      ptx::store_shared(ptx::shared_address(&storage.P[warp_row + r][lane]), P);
#pragma unroll
      for (int c = 0; c < 4; ++c) O[r][c] *= rescale;
    }
    __syncwarp();  // P is visible to every lane

    // O += P V: the lane's columns of every row.
    if (column < dim) {
#pragma unroll 4
      for (int j = 0; j < block_kv; ++j) {
        const tile::Four v = load_four(storage.V[j][column]);
#pragma unroll
        for (int r = 0; r < rows; ++r) {
          const float P = ptx::load_shared<float>(ptx::shared_address(&storage.P[warp_row + r][j]));
#pragma unroll
          for (int c = 0; c < 4; ++c) O[r][c] = ptx::fma(P, v[c], O[r][c]);
        }
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
    if (column < dim) store_four(O_gmem.row(warp_row + r) + column, O[r], factor);
    // The log-sum-exp of the row, which the backward pass needs.
    if (args.lse != nullptr && lane == 0) {
      float* lse = args.lse + tile::statistics_offset<features>(args, sequence, block.head_idx) + i;
      ptx::store_global(lse, sum == 0 ? -tile::infinity : row_max[r] + tile::log(sum));
    }
  }
}

}  // namespace flash_attention
