#pragma once

// The idea:  dq alone: a block keeps 32 queries and 32 keys in shared memory; a value read serves eight rows.
// From b0:   in dq a warp takes eight queries; a lane takes a key for S and dP, and four columns for the sums.
// It buys:   keys that are read once for 32 queries. dkv, which has most of the work, is as it was.
// The limit: dkv: every key still reads all queries, and sums ten shuffles for each score.
//
//   delta   delta[i] = sum over d of dO[i][d] O[i][d] - dlse[i]          a warp takes a query
//   dq      dQ[i]    = scale * sum over j of dS[i][j] K[j]               a block takes 32 queries
//   dkv     dV[j]    = sum over i of P[i][j] dO[i]                       a warp takes eight keys
//           dK[j]    = scale * sum over i of dS[i][j] Q[i]
//
//   P[i][j] = exp(scale Q[i] K[j] - lse[i]),  dP[i][j] = dO[i] V[j],  dS[i][j] = P[i][j] (dP[i][j] - delta[i])

#include "ladder/parts/backward.cuh"
#include "ladder/parts/float_products.cuh"

namespace flash_attention {

using namespace abi;

/// Rows of the block, rows of the current tile, and the weights of each pair.
template <int dim, int block_rows, int tile_rows>
struct FloatStorage {
  alignas(16) float own[2][block_rows][dim];            // Q and dO
  alignas(16) float tile[2][tile_rows][dim + 4];        // K and V; four more: the lanes read a column
  alignas(16) float weights[1][block_rows][tile_rows];  // dS
};

template <BackwardConfig config>
__device__ __forceinline__ void dq(const AttentionArgs& args) {
  constexpr Features features = config.features;
  constexpr int dim = config.head_dim, block_q = config.block_q, block_kv = config.block_kv;
  constexpr int threads = 32 * config.num_warps, rows = block_q / config.num_warps;
  using Element = ptx::Element<features.dtype>;
  static_assert(block_kv == 32 && dim <= 128, "a lane has one key and four columns");
  auto& storage = ptx::shared_storage<FloatStorage<dim, block_q, block_kv>>();
  // The tile of queries, the head and the sequence that this block computes.
  const auto block = tile::query_block(blockIdx.x, tile::ceil_div(args.seq_q, block_q), args.heads_q);
  const int lane = threadIdx.x % 32, warp_row = static_cast<int>(threadIdx.x) / 32 * rows, column = 4 * lane;
  const int q_begin = block.tile_idx * block_q;

  const tile::Sequence sequence = tile::make_sequence<features>(args, block.batch_idx);
  const auto K_gmem = tile::key_rows<const Element, features>(args.K, sequence, block.head_idx / args.group);
  const auto V_gmem = tile::key_rows<const Element, features>(args.V, sequence, block.head_idx / args.group);
  const auto dQ_gmem = tile::query_rows<Element, features>(args.dQ, sequence, block.head_idx).from(q_begin);
  const long long statistics = tile::statistics_offset<features>(args, sequence, block.head_idx);
  load_tile<threads, dim>(storage.own[0],
                          tile::query_rows<const Element, features>(args.Q, sequence, block.head_idx).from(q_begin));
  load_tile<threads, dim>(storage.own[1],
                          tile::query_rows<const Element, features>(args.dO, sequence, block.head_idx).from(q_begin));

  float lse[rows], delta[rows];
  tile::Four dQ[rows]{};
#pragma unroll
  for (int r = 0; r < rows; ++r) {
    const int i = q_begin + warp_row + r;
    lse[r] = i < args.seq_q ? usable(args.lse[statistics + i]) : tile::infinity;
    delta[r] = i < args.seq_q ? delta_of(args, statistics)[i] : 0;
  }
  const int last_query = tile::min(q_begin + block_q, args.seq_q) - 1;  // it sees the most keys
  for (int kv_begin = 0; kv_begin < end_of_keys<features>(args, last_query); kv_begin += block_kv) {
    __syncthreads();  // every warp is done with the previous tile
    load_tile<threads, dim>(storage.tile[0], K_gmem.from(kv_begin));
    load_tile<threads, dim>(storage.tile[1], V_gmem.from(kv_begin));
    __syncthreads();  // the tile is visible to every warp

    float S[rows]{}, dP[rows]{};
    dot_products<dim>(S, dP, storage, warp_row, lane);
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      const bool visible = kv_begin + lane < end_of_keys<features>(args, q_begin + warp_row + r);
      const float P = visible ? tile::exp(S[r] * args.scale - lse[r]) : 0;
      ptx::store_shared(ptx::shared_address(&storage.weights[0][warp_row + r][lane]), P * (dP[r] - delta[r]));
    }
    __syncwarp();  // the warp's rows of dS are in shared memory
    if (column < dim) add_rows(dQ, storage.weights[0], storage.tile[0], warp_row, column);
  }
#pragma unroll
  for (int r = 0; r < rows; ++r) {
    if (warp_row + r < dQ_gmem.count && column < dim) store_four(dQ_gmem.row(warp_row + r) + column, dQ[r], args.scale);
  }
}

template <BackwardConfig config>
__device__ __forceinline__ void dkv(const AttentionArgs& args) {
  constexpr Features features = config.features;
  using Element = ptx::Element<features.dtype>;
  // Which tile of keys, of which head and sequence, this block computes.
  const auto block = tile::key_block(blockIdx.x, tile::ceil_div(args.seq_kv, config.block_kv), args.heads_kv);
  const int lane = threadIdx.x % 32, kv_begin = block.tile_idx * config.block_kv;
  const int kv_end = tile::min(kv_begin + config.block_kv, args.seq_kv);

  const tile::Sequence sequence = tile::make_sequence<features>(args, block.batch_idx);
  for (int j = kv_begin + static_cast<int>(threadIdx.x) / 32; j < kv_end; j += config.num_warps) {
    Columns<config.head_dim> K, V, Q, dO, dK{}, dV{};
    K.load(tile::key_rows<const Element, features>(args.K, sequence, block.head_idx).row(j), lane);
    V.load(tile::key_rows<const Element, features>(args.V, sequence, block.head_idx).row(j), lane);
    for (int head_idx = block.head_idx * args.group; head_idx < (block.head_idx + 1) * args.group; ++head_idx) {
      const auto Q_gmem = tile::query_rows<const Element, features>(args.Q, sequence, head_idx);
      const auto dO_gmem = tile::query_rows<const Element, features>(args.dO, sequence, head_idx);
      const long long statistics = tile::statistics_offset<features>(args, sequence, head_idx);
      for (int i = begin_of_queries<features>(args, j); i < args.seq_q; ++i) {
        Q.load(Q_gmem.row(i), lane);
        dO.load(dO_gmem.row(i), lane);
        const float P = tile::exp(dot(Q, K) * args.scale - usable(args.lse[statistics + i]));
        dV.add(P, dO);
        dK.add(P * (dot(dO, V) - delta_of(args, statistics)[i]), Q);
      }
    }
    dK.store(tile::key_rows<Element, features>(args.dK, sequence, block.head_idx).row(j), lane, args.scale);
    dV.store(tile::key_rows<Element, features>(args.dV, sequence, block.head_idx).row(j), lane, 1);
  }
}

}  // namespace flash_attention
