#pragma once

// The idea:  cp.async copies without threads: the next tile is on its way while this one is multiplied.
// From b2:   two buffers for the tile, tile::copy_tile_async instead of load_tile, a wait for all groups but the latest.
// It buys:   nearly twice the speed: the loop no longer waits for memory.
// The limit: S and dP are computed twice, and shared memory brings an ldmatrix for every two mma.
//
//   delta   delta[i] = sum over d of dO[i][d] O[i][d] - dlse[i]          a warp takes a query
//   dq      dQ[i]    = scale * sum over j of dS[i][j] K[j]               a block takes 64 queries
//   dkv     dV[j]    = sum over i of P[i][j] dO[i]                       a block takes 64 keys
//           dK[j]    = scale * sum over i of dS[i][j] Q[i]
//
//   P[i][j] = exp(scale Q[i] K[j] - lse[i]),  dP[i][j] = dO[i] V[j],  dS[i][j] = P[i][j] (dP[i][j] - delta[i])

#include "ptx/convert.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "tile/copy.cuh"
#include "tile/mma.cuh"
#include "tile/sequence.cuh"
#include "tile/workspace.cuh"

namespace flash_attention {

using namespace abi;

/// Query i sees the keys before this one: all or, under a causal mask, those up to the diagonal, which ends in the last
/// corner.
template <Features features>
__device__ __forceinline__ int end_of_keys(const AttentionArgs& args, int i) {
  return features.window_right ? tile::min(i + args.seq_kv - args.seq_q + 1, args.seq_kv) : args.seq_kv;
}

/// Key j is seen by this query and those after it.
template <Features features>
__device__ __forceinline__ int begin_of_queries(const AttentionArgs& args, int j) {
  return features.window_right ? tile::max(j - (args.seq_kv - args.seq_q), 0) : 0;
}

/// A lane's columns of a row: lane, lane + 32, ...
template <int dim>
struct Columns {
  static constexpr int count = tile::ceil_div(dim, 32);
  float values[count];

  template <typename Element>
  __device__ __forceinline__ void load(const Element* row, int lane) {
#pragma unroll
    for (int c = 0; c < count; ++c) {
      const int d = 32 * c + lane;
      values[c] = d < dim ? ptx::to_float(ptx::load_readonly(row + d)) : 0;
    }
  }

  template <typename Element>
  __device__ __forceinline__ void store(Element* row, int lane, float factor) const {
#pragma unroll
    for (int c = 0; c < count; ++c) {
      const int d = 32 * c + lane;
      if (d < dim) ptx::store_global(row + d, ptx::from_float<Element>(values[c] * factor));
    }
  }

  __device__ __forceinline__ void add(float weight, const Columns& row) {
#pragma unroll
    for (int c = 0; c < count; ++c) values[c] = ptx::fma(weight, row.values[c], values[c]);
  }
};

/// The dot product of two rows, in every lane.
template <int dim>
__device__ __forceinline__ float dot(const Columns<dim>& a, const Columns<dim>& b) {
  float sum = 0;
#pragma unroll
  for (int c = 0; c < a.count; ++c) sum = ptx::fma(a.values[c], b.values[c], sum);
#pragma unroll
  for (int lane = 1; lane < 32; lane *= 2) sum += ptx::shuffle_xor(sum, lane);
  return sum;
}

__device__ __forceinline__ float* delta_of(const AttentionArgs& args, long long statistics) {
  return tile::workspace<float>(args, BackwardRegion::delta) + statistics;
}

/// A row that saw no key has lse = -inf and no probabilities: with +inf, every exp(S - lse) is 0.
__device__ __forceinline__ float usable(float lse) { return lse == -tile::infinity ? tile::infinity : lse; }

template <BackwardConfig config>
__device__ __forceinline__ void delta(const AttentionArgs& args) {
  constexpr Features features = config.features;
  using Element = ptx::Element<features.dtype>;
  const auto block = tile::query_block(blockIdx.x, tile::ceil_div(args.seq_q, config.num_warps), args.heads_q);
  const int lane = threadIdx.x % 32, i = block.tile_idx * config.num_warps + threadIdx.x / 32;
  if (i >= args.seq_q) return;

  const tile::Sequence sequence = tile::make_sequence<features>(args, block.batch_idx);
  const long long statistics = tile::statistics_offset<features>(args, sequence, block.head_idx);
  Columns<config.head_dim> O, dO;
  O.load(tile::query_rows<const Element, features>(args.O, sequence, block.head_idx).row(i), lane);
  dO.load(tile::query_rows<const Element, features>(args.dO, sequence, block.head_idx).row(i), lane);
  const float sum = dot(O, dO) - (args.dlse != nullptr ? args.dlse[statistics + i] : 0);
  if (lane == 0) ptx::store_global(delta_of(args, statistics) + i, sum);
}

/// Rows of the block, and rows of the tile it has come to and of the next one, 16 bits.
template <int dim, int block_rows, int tile_rows>
struct SharedStorage {
  using Own = tile::SwizzledTile<block_rows, dim>;
  using Tile = tile::SwizzledTile<tile_rows, dim>;
  struct Stage {
    Tile tile[2];                                       // K and V, or Q and dO
    alignas(8) float lse[tile_rows], delta[tile_rows];  // dkv: of the queries of the tile
  };
  Own own[2];  // Q and dO, or K and V
  Stage stages[2];
};

/// Starts copying rows of a tensor to shared memory; rows that do not exist become zero.
template <int threads, int dim, typename Tile, typename Element>
__device__ __forceinline__ void load_tile(Tile& to, const tile::Rows<const Element>& from) {
  tile::copy_tile_async<threads, dim, Tile>(ptx::shared_address(&to), from, threadIdx.x);
}

/// C = own tile^T: 16 rows of the block with the rows of the tile from first_row on.
template <Type type, typename Own, typename Tile, int blocks>
__device__ __forceinline__ void dot_products(float (&C)[1][blocks][4], const Own& own, int warp_row, const Tile& tile,
                                             int first_row, int lane) {
  const unsigned own_address = tile::a_address<Own>(ptx::shared_address(&own), warp_row, lane);
  const unsigned tile_address = ptx::shared_address(&tile);
  tile::multiply<type, Own::columns / 16>(
      C, [&](unsigned(&A)[4], int, int step) { ptx::ldmatrix_x4(A, Own::step(own_address, 2 * step)); },
      [&](unsigned(&B)[4], int n, int step) {
        ptx::ldmatrix_x4(B, Tile::step(tile::b_transposed_address<Tile>(tile_address, first_row + 16 * n, lane), 2 * step));
      });
}

/// sum += weights tile: 16 rows of weights with the rows of the tile from first_row on.
template <Type type, typename Tile, int blocks, int columns>
__device__ __forceinline__ void add_rows(float (&sum)[1][blocks][4], const float (&weights)[columns][4], const Tile& tile,
                                         int first_row, int lane) {
  const unsigned tile_address = ptx::shared_address(&tile);
  tile::multiply<type, columns / 2>(
      sum, [&](unsigned(&A)[4], int, int step) { tile::pack_a<type>(A, weights[2 * step], weights[2 * step + 1]); },
      [&](unsigned(&B)[4], int n, int step) {
        ptx::ldmatrix_x4_trans(B, Tile::step(tile::b_address<Tile>(tile_address, first_row + 16 * step, lane), 2 * n));
      });
}

/// 16 rows of a sum to a tensor, rounded.
template <Type type, int dim, int blocks, typename Element>
__device__ __forceinline__ void store_rows(const tile::Rows<Element>& to, const float (&sum)[1][blocks][4], int warp_row,
                                           const tile::LanePlace& place, float factor) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp_row + place.row + 8 * half;
    if (row >= to.count) continue;
#pragma unroll
    for (int n = 0; n < dim / 8; ++n) {
      const unsigned pair = ptx::pack<type>(sum[0][n][2 * half] * factor, sum[0][n][2 * half + 1] * factor);
      ptx::store_global(reinterpret_cast<unsigned*>(to.row(row) + 8 * n + place.column), pair);
    }
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
  float dQ[1][dim / 8][4]{};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = q_begin + warp_row + place.row + 8 * half;
    lse[half] = i < args.seq_q ? usable(args.lse[statistics + i]) : tile::infinity;
    delta[half] = i < args.seq_q ? delta_of(args, statistics)[i] : 0;
  }
  const int last_query = tile::min(q_begin + block_q, args.seq_q) - 1;  // it sees the most keys
  const auto load_keys = [&](int kv_begin) {
    auto& stage = storage.stages[kv_begin / block_kv % 2];
    load_tile<threads, config.head_dim>(stage.tile[0], K_gmem.from(kv_begin));
    load_tile<threads, config.head_dim>(stage.tile[1], V_gmem.from(kv_begin));
    ptx::copy_async_commit();
  };
  load_keys(0);  // in one group with Q and dO
#pragma unroll 1
  for (int kv_begin = 0; kv_begin < end_of_keys<features>(args, last_query); kv_begin += block_kv) {
    load_keys(kv_begin + block_kv);  // past the last tile: zeros that nobody reads
    ptx::copy_async_wait<1>();
    __syncthreads();  // the tile is there for every warp
    const auto& stage = storage.stages[kv_begin / block_kv % 2];

#pragma unroll 1
    for (int first = 0; first < block_kv; first += part) {
      float S[1][part / 8][4]{}, dP[1][part / 8][4]{};
      dot_products<type>(S, storage.own[0], warp_row, stage.tile[0], first, lane);
      dot_products<type>(dP, storage.own[1], warp_row, stage.tile[1], first, lane);
#pragma unroll
      for (int n = 0; n < part / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int i = q_begin + warp_row + place.row + 8 * (e / 2), j = kv_begin + first + 8 * n + place.column + e % 2;
          const float P = j < end_of_keys<features>(args, i) ? tile::exp(S[0][n][e] * args.scale - lse[e / 2]) : 0;
          S[0][n][e] = P * (dP[0][n][e] - delta[e / 2]);  // dS, in the place of S
        }
      }
      add_rows<type>(dQ, S[0], stage.tile[0], first, lane);
    }
    __syncthreads();  // every warp is done with the tile: the one after the next may take its place
  }
  ptx::copy_async_wait<0>();
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

  float dK[1][dim / 8][4]{}, dV[1][dim / 8][4]{};
#pragma unroll 1
  for (int head_idx = block.head_idx * args.group; head_idx < (block.head_idx + 1) * args.group; ++head_idx) {
    const auto Q_gmem = tile::query_rows<const Element, features>(args.Q, sequence, head_idx);
    const auto dO_gmem = tile::query_rows<const Element, features>(args.dO, sequence, head_idx);
    const long long statistics = tile::statistics_offset<features>(args, sequence, head_idx);
    const int first_query = begin_of_queries<features>(args, kv_begin) / block_q * block_q;
    const auto load_queries = [&](int q_begin) {
      auto& stage = storage.stages[q_begin / block_q % 2];
      load_tile<threads, config.head_dim>(stage.tile[0], Q_gmem.from(q_begin));
      load_tile<threads, config.head_dim>(stage.tile[1], dO_gmem.from(q_begin));
      if (const int row = threadIdx.x, i = q_begin + row;
          row < block_q) {  // a row that does not exist: zeros, like Q and dO
        const int valid = i < args.seq_q ? 4 : 0;
        ptx::copy_async_small<4>(ptx::shared_address(&stage.lse[row]), args.lse + statistics + i, valid);
        ptx::copy_async_small<4>(ptx::shared_address(&stage.delta[row]), delta_of(args, statistics) + i, valid);
      }
      ptx::copy_async_commit();
    };
    load_queries(first_query);  // for the first head, in one group with K and V
#pragma unroll 1
    for (int q_begin = first_query; q_begin < args.seq_q; q_begin += block_q) {
      load_queries(q_begin + block_q);  // past the last tile: zeros that nobody reads
      ptx::copy_async_wait<1>();
      __syncthreads();  // the tile is there for every warp
      const auto& stage = storage.stages[q_begin / block_q % 2];

#pragma unroll 1
      for (int first = 0; first < block_q; first += part) {
        float S[1][part / 8][4]{}, dP[1][part / 8][4]{};  // transposed: a row is a key, a column a query
        dot_products<type>(S, storage.own[0], warp_row, stage.tile[0], first, lane);
        dot_products<type>(dP, storage.own[1], warp_row, stage.tile[1], first, lane);
#pragma unroll
        for (int n = 0; n < part / 8; ++n) {
          using Pair = ptx::Vector<float, 2>;
          const int column = first + 8 * n + place.column;
          const Pair lse = ptx::load_shared<Pair>(ptx::shared_address(&stage.lse[column]));
          const Pair delta = ptx::load_shared<Pair>(ptx::shared_address(&stage.delta[column]));
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int j = kv_begin + warp_row + place.row + 8 * (e / 2), i = q_begin + column + e % 2;
            const float P =
                j < end_of_keys<features>(args, i) ? tile::exp(S[0][n][e] * args.scale - usable(lse[e % 2])) : 0;
            S[0][n][e] = P;
            dP[0][n][e] = P * (dP[0][n][e] - delta[e % 2]);  // dS, in the place of dP
          }
        }
        add_rows<type>(dV, S[0], stage.tile[1], first, lane);
        add_rows<type>(dK, dP[0], stage.tile[0], first, lane);
      }
      __syncthreads();  // every warp is done with the tile: the one after the next may take its place
    }
    ptx::copy_async_wait<0>();  // the zeros past the last tile come before what the thread loads there for the next head
  }
  store_rows<type, config.head_dim>(dK_gmem, dK, warp_row, place, args.scale);
  store_rows<type, config.head_dim>(dV_gmem, dV, warp_row, place, 1);
}

}  // namespace flash_attention
