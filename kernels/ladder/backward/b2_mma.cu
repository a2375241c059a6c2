#pragma once

// The idea:  all seven products on tensor cores; P and dS go from one into the next in registers.
// From b1a:  dkv, too, with keys as rows, so that P and dS are left operands as they are; tiles of 64 rows.
// It buys:   six times the speed: tensor cores, and P and dS that never leave registers.
// The limit: S and dP are computed twice, and the tensor cores wait while a tile is loaded.
//
//   delta   delta[i] = sum over d of dO[i][d] O[i][d] - dlse[i]          a warp takes a query
//   dq      dQ[i]    = scale * sum over j of dS[i][j] K[j]               a block takes 64 queries
//   dkv     dV[j]    = sum over i of P[i][j] dO[i]                       a block takes 64 keys
//           dK[j]    = scale * sum over i of dS[i][j] Q[i]
//
//   P[i][j] = exp(scale Q[i] K[j] - lse[i]),  dP[i][j] = dO[i] V[j],  dS[i][j] = P[i][j] (dP[i][j] - delta[i])

#include "ladder/parts/backward.cuh"
#include "ladder/parts/mma_products.cuh"

namespace flash_attention {

using namespace abi;

/// Rows of the block and rows of the current tile, 16 bits.
template <int dim, int block_rows, int tile_rows>
struct SharedStorage {
  using Own = tile::SwizzledTile<block_rows, dim>;
  using Tile = tile::SwizzledTile<tile_rows, dim>;
  Own own[2];                                         // Q and dO, or K and V
  Tile tile[2];                                       // K and V, or Q and dO
  alignas(8) float lse[tile_rows], delta[tile_rows];  // dkv: of the queries of the tile
};

/// Loads rows of a tensor to shared memory. Rows that do not exist, and columns from head_dim on, become zero.
template <int threads, int dim, typename Tile, typename Element>
__device__ __forceinline__ void load_tile(Tile& to, const tile::Rows<const Element>& from) {
  using Chunk = ptx::Vector<Element, 8>;
  constexpr int chunks = Tile::columns / 8;
  for (int index = threadIdx.x; index < Tile::rows * chunks; index += threads) {
    const int row = index / chunks, chunk = index % chunks;
    Chunk values{};
    if (row < from.count && chunk * 8 < dim) {
      values = ptx::load_readonly(reinterpret_cast<const Chunk*>(from.row(row) + chunk * 8));
    }
    ptx::store_shared(ptx::shared_address(&to) + Tile::offset(row, chunk), values);
  }
}

constexpr int part = 32;  // rows of a tile whose scores are in registers at a time

template <BackwardConfig config>
__device__ __forceinline__ void dq(const AttentionArgs& args) {
  constexpr Features features = config.features;
  constexpr Type type = features.dtype;
  constexpr int dim = tile::round_up(config.head_dim, 16), block_q = config.block_q, block_kv = config.block_kv;
  constexpr int threads = 32 * config.num_warps;
  using Element = ptx::Element<type>;
  static_assert(block_q == 16 * config.num_warps);
  auto& storage = ptx::shared_storage<SharedStorage<dim, block_q, block_kv>>();
  // The tile of queries, the head and the sequence that this block computes.
  const auto block = tile::query_block(blockIdx.x, tile::ceil_div(args.seq_q, block_q), args.heads_q);
  const int lane = threadIdx.x % 32, warp_row = static_cast<int>(threadIdx.x) / 32 * 16;
  const tile::LanePlace place(lane);
  const int q_begin = block.tile_idx * block_q;

  const tile::Sequence sequence = tile::make_sequence<features>(args, block.batch_idx);
  const auto K_gmem = tile::key_rows<const Element, features>(args.K, sequence, block.head_idx / args.group);
  const auto V_gmem = tile::key_rows<const Element, features>(args.V, sequence, block.head_idx / args.group);
  const auto dQ_gmem = tile::query_rows<Element, features>(args.dQ, sequence, block.head_idx).from(q_begin);
  const long long statistics = tile::statistics_offset<features>(args, sequence, block.head_idx);
  load_tile<threads, config.head_dim>(
      storage.own[0], tile::query_rows<const Element, features>(args.Q, sequence, block.head_idx).from(q_begin));
  load_tile<threads, config.head_dim>(
      storage.own[1], tile::query_rows<const Element, features>(args.dO, sequence, block.head_idx).from(q_begin));

  float lse[2], delta[2];
  // 16 rows of dQ, in fp32, for the whole loop.
  float dQ[1][dim / 8][4]{};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = q_begin + warp_row + place.row + 8 * half;
    lse[half] = i < args.seq_q ? usable(args.lse[statistics + i]) : tile::infinity;
    delta[half] = i < args.seq_q ? delta_of(args, statistics)[i] : 0;
  }
  const int last_query = tile::min(q_begin + block_q, args.seq_q) - 1;  // it sees the most keys
#pragma unroll 1
  for (int kv_begin = 0; kv_begin < end_of_keys<features>(args, last_query); kv_begin += block_kv) {
    __syncthreads();  // every warp is done with the previous tile
    load_tile<threads, config.head_dim>(storage.tile[0], K_gmem.from(kv_begin));
    load_tile<threads, config.head_dim>(storage.tile[1], V_gmem.from(kv_begin));
    __syncthreads();  // the tile is visible to every warp

#pragma unroll 1
    for (int first = 0; first < block_kv; first += part) {
      float S[1][part / 8][4]{}, dP[1][part / 8][4]{};
      // S = Q K^T and dP = dO V^T, 32 columns at a time.
      dot_products<type>(S, storage.own[0], warp_row, storage.tile[0], first, lane);
      dot_products<type>(dP, storage.own[1], warp_row, storage.tile[1], first, lane);
#pragma unroll
      for (int n = 0; n < part / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          // Elements 0 and 1 are in row g of the warp, 2 and 3 in row g + 8.
          const int i = q_begin + warp_row + place.row + 8 * (e / 2), j = kv_begin + first + 8 * n + place.column + e % 2;
          const float P = j < end_of_keys<features>(args, i) ? tile::exp(S[0][n][e] * args.scale - lse[e / 2]) : 0;
          S[0][n][e] = P * (dP[0][n][e] - delta[e / 2]);  // dS, in place of S
        }
      }
      add_rows<type>(dQ, S[0], storage.tile[0], first, lane);
    }
  }
  store_rows<type, config.head_dim>(dQ_gmem, dQ, warp_row, place, args.scale);
}

template <BackwardConfig config>
__device__ __forceinline__ void dkv(const AttentionArgs& args) {
  constexpr Features features = config.features;
  constexpr Type type = features.dtype;
  constexpr int dim = tile::round_up(config.head_dim, 16), block_q = config.block_q, block_kv = config.block_kv;
  constexpr int threads = 32 * config.num_warps;
  using Element = ptx::Element<type>;
  static_assert(block_kv == 16 * config.num_warps && block_q <= threads);
  auto& storage = ptx::shared_storage<SharedStorage<dim, block_kv, block_q>>();
  // Which tile of keys, of which head and sequence, this block computes.
  const auto block = tile::key_block(blockIdx.x, tile::ceil_div(args.seq_kv, block_kv), args.heads_kv);
  const int lane = threadIdx.x % 32, warp_row = static_cast<int>(threadIdx.x) / 32 * 16;
  const tile::LanePlace place(lane);
  const int kv_begin = block.tile_idx * block_kv;

  const tile::Sequence sequence = tile::make_sequence<features>(args, block.batch_idx);
  const auto dK_gmem = tile::key_rows<Element, features>(args.dK, sequence, block.head_idx).from(kv_begin);
  const auto dV_gmem = tile::key_rows<Element, features>(args.dV, sequence, block.head_idx).from(kv_begin);
  load_tile<threads, config.head_dim>(
      storage.own[0], tile::key_rows<const Element, features>(args.K, sequence, block.head_idx).from(kv_begin));
  load_tile<threads, config.head_dim>(
      storage.own[1], tile::key_rows<const Element, features>(args.V, sequence, block.head_idx).from(kv_begin));

  // 16 rows of dK and dV, in fp32, for the whole loop: 128 registers at head_dim 128.
  float dK[1][dim / 8][4]{}, dV[1][dim / 8][4]{};
#pragma unroll 1
  for (int head_idx = block.head_idx * args.group; head_idx < (block.head_idx + 1) * args.group; ++head_idx) {
    const auto Q_gmem = tile::query_rows<const Element, features>(args.Q, sequence, head_idx);
    const auto dO_gmem = tile::query_rows<const Element, features>(args.dO, sequence, head_idx);
    const long long statistics = tile::statistics_offset<features>(args, sequence, head_idx);
    const int first_query = begin_of_queries<features>(args, kv_begin) / block_q * block_q;
#pragma unroll 1
    for (int q_begin = first_query; q_begin < args.seq_q; q_begin += block_q) {
      __syncthreads();  // every warp is done with the previous tile
      load_tile<threads, config.head_dim>(storage.tile[0], Q_gmem.from(q_begin));
      load_tile<threads, config.head_dim>(storage.tile[1], dO_gmem.from(q_begin));
      if (const int row = threadIdx.x, i = q_begin + row; row < block_q) {
        const float lse = i < args.seq_q ? usable(args.lse[statistics + i]) : tile::infinity;
        ptx::store_shared(ptx::shared_address(&storage.lse[row]), lse);
        ptx::store_shared(ptx::shared_address(&storage.delta[row]), i < args.seq_q ? delta_of(args, statistics)[i] : 0.0f);
      }
      __syncthreads();  // the tile is visible to every warp

#pragma unroll 1
      for (int first = 0; first < block_q; first += part) {
        float S[1][part / 8][4]{}, dP[1][part / 8][4]{};  // transposed: a row is a key, a column a query
        // S^T = K Q^T and dP^T = V dO^T, 32 columns at a time.
        dot_products<type>(S, storage.own[0], warp_row, storage.tile[0], first, lane);
        dot_products<type>(dP, storage.own[1], warp_row, storage.tile[1], first, lane);
#pragma unroll
        for (int n = 0; n < part / 8; ++n) {
          using Pair = ptx::Vector<float, 2>;
          const int column = first + 8 * n + place.column;
          const Pair lse = ptx::load_shared<Pair>(ptx::shared_address(&storage.lse[column]));
          const Pair delta = ptx::load_shared<Pair>(ptx::shared_address(&storage.delta[column]));
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int j = kv_begin + warp_row + place.row + 8 * (e / 2), i = q_begin + column + e % 2;
            const float P = j < end_of_keys<features>(args, i) ? tile::exp(S[0][n][e] * args.scale - lse[e % 2]) : 0;
            S[0][n][e] = P;
            dP[0][n][e] = P * (dP[0][n][e] - delta[e % 2]);  // dS, in place of dP
          }
        }
        add_rows<type>(dV, S[0], storage.tile[1], first, lane);
        add_rows<type>(dK, dP[0], storage.tile[0], first, lane);
      }
    }
  }
  store_rows<type, config.head_dim>(dK_gmem, dK, warp_row, place, args.scale);
  store_rows<type, config.head_dim>(dV_gmem, dV, warp_row, place, 1);
}

}  // namespace flash_attention
