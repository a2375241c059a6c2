#pragma once

// The idea:  a block keeps 32 rows of its side and 32 of the other in shared memory; a value read serves eight rows.
// From b0:   a warp takes eight rows; a lane takes a row of the tile for S and dP, and four columns for the sums.
// It buys:   a third of the time: rows of the other side are read once for 32 rows of this one.
// The limit: CUDA cores, and the shared memory that feeds them: a load for every four multiplications.
//
//   delta   delta[i] = sum over d of dO[i][d] O[i][d] - dlse[i]          a warp takes a query
//   dq      dQ[i]    = scale * sum over j of dS[i][j] K[j]               a block takes 32 queries
//   dkv     dV[j]    = sum over i of P[i][j] dO[i]                       a block takes 32 keys
//           dK[j]    = scale * sum over i of dS[i][j] Q[i]
//
//   P[i][j] = exp(scale Q[i] K[j] - lse[i]),  dP[i][j] = dO[i] V[j],  dS[i][j] = P[i][j] (dP[i][j] - delta[i])

#include "ptx/convert.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "tile/element.cuh"
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

/// Rows of the block, rows of the tile it has come to, and the weights of each pair.
template <int dim, int block_rows, int tile_rows>
struct SharedStorage {
  alignas(16) float own[2][block_rows][dim];            // Q and dO, or K and V
  alignas(16) float tile[2][tile_rows][dim + 4];        // K and V, or Q and dO; four more: the lanes read a column
  alignas(16) float weights[2][block_rows][tile_rows];  // dS, and for dkv also P
};

__device__ __forceinline__ tile::Four load_four(const float& from) {
  return ptx::load_shared<tile::Four>(ptx::shared_address(&from));
}

/// Rows of a tensor to shared memory, as floats; rows that do not exist become zero.
template <int dim, int threads, int rows, int columns, typename Element>
__device__ __forceinline__ void load_tile(float (&to)[rows][columns], const tile::Rows<const Element>& from) {
  using Raw = ptx::Vector<Element, 4>;
  for (int group = threadIdx.x; group < rows * dim / 4; group += threads) {
    const int row = group / (dim / 4), d = group % (dim / 4) * 4;
    Raw raw{};
    if (row < from.count) raw = ptx::load_readonly(reinterpret_cast<const Raw*>(from.row(row) + d));
    const tile::Four values{{ptx::to_float(raw[0]), ptx::to_float(raw[1]), ptx::to_float(raw[2]), ptx::to_float(raw[3])}};
    ptx::store_shared(ptx::shared_address(&to[row][d]), values);
  }
}

/// The lane's row of the tile with every row of the warp: S = Q K^T and dP = dO V^T, or both transposed.
template <int dim, int rows, typename Storage>
__device__ __forceinline__ void dot_products(float (&S)[rows], float (&dP)[rows], const Storage& storage, int warp_row,
                                             int lane) {
#pragma unroll 4
  for (int d = 0; d < dim; d += 4) {
    const tile::Four a = load_four(storage.tile[0][lane][d]), b = load_four(storage.tile[1][lane][d]);
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      const tile::Four own_a = load_four(storage.own[0][warp_row + r][d]),
                       own_b = load_four(storage.own[1][warp_row + r][d]);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        S[r] = ptx::fma(own_a[c], a[c], S[r]);
        dP[r] = ptx::fma(own_b[c], b[c], dP[r]);
      }
    }
  }
}

/// sum[r] += weights of row r times the rows of the tile: the lane's four columns.
template <int rows, int tile_rows, int block_rows, int columns>
__device__ __forceinline__ void add_rows(tile::Four (&sum)[rows], const float (&weights)[block_rows][tile_rows],
                                         const float (&from)[tile_rows][columns], int warp_row, int column) {
#pragma unroll 4
  for (int j = 0; j < tile_rows; j += 4) {
    tile::Four values[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) values[e] = load_four(from[j + e][column]);
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      const tile::Four weight = load_four(weights[warp_row + r][j]);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
#pragma unroll
        for (int c = 0; c < 4; ++c) sum[r][c] = ptx::fma(weight[e], values[e][c], sum[r][c]);
      }
    }
  }
}

template <typename Element>
__device__ __forceinline__ void store_four(Element* to, const tile::Four& values, float factor) {
  ptx::Vector<Element, 4> rounded;
#pragma unroll
  for (int c = 0; c < 4; ++c) rounded[c] = ptx::from_float<Element>(values[c] * factor);
  ptx::store_global(reinterpret_cast<ptx::Vector<Element, 4>*>(to), rounded);
}

template <BackwardConfig config>
__device__ __forceinline__ void dq(const AttentionArgs& args) {
  constexpr Features features = config.features;
  constexpr int dim = config.head_dim, block_q = config.block_q, block_kv = config.block_kv;
  constexpr int threads = 32 * config.num_warps, rows = block_q / config.num_warps;
  using Element = ptx::Element<features.dtype>;
  static_assert(block_kv == 32 && dim <= 128, "a lane has one key and four columns");
  auto& storage = ptx::shared_storage<SharedStorage<dim, block_q, block_kv>>();
  const auto block = tile::query_block(blockIdx.x, tile::ceil_div(args.seq_q, block_q), args.heads_q);
  const int lane = threadIdx.x % 32, warp_row = static_cast<int>(threadIdx.x) / 32 * rows, column = 4 * lane;
  const int q_begin = block.tile_idx * block_q;

  const tile::Sequence sequence = tile::make_sequence<features>(args, block.batch_idx);
  const auto K_gmem = tile::key_rows<const Element, features>(args.K, sequence, block.head_idx / args.group);
  const auto V_gmem = tile::key_rows<const Element, features>(args.V, sequence, block.head_idx / args.group);
  const auto dQ_gmem = tile::query_rows<Element, features>(args.dQ, sequence, block.head_idx).from(q_begin);
  const long long statistics = tile::statistics_offset<features>(args, sequence, block.head_idx);
  load_tile<dim, threads>(storage.own[0],
                          tile::query_rows<const Element, features>(args.Q, sequence, block.head_idx).from(q_begin));
  load_tile<dim, threads>(storage.own[1],
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
    load_tile<dim, threads>(storage.tile[0], K_gmem.from(kv_begin));
    load_tile<dim, threads>(storage.tile[1], V_gmem.from(kv_begin));
    __syncthreads();  // the tile is there for every warp

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
  constexpr int dim = config.head_dim, block_q = config.block_q, block_kv = config.block_kv;
  constexpr int threads = 32 * config.num_warps, rows = block_kv / config.num_warps;
  using Element = ptx::Element<features.dtype>;
  static_assert(block_q == 32 && dim <= 128, "a lane has one query and four columns");
  auto& storage = ptx::shared_storage<SharedStorage<dim, block_kv, block_q>>();
  const auto block = tile::key_block(blockIdx.x, tile::ceil_div(args.seq_kv, block_kv), args.heads_kv);
  const int lane = threadIdx.x % 32, warp_row = static_cast<int>(threadIdx.x) / 32 * rows, column = 4 * lane;
  const int kv_begin = block.tile_idx * block_kv;

  const tile::Sequence sequence = tile::make_sequence<features>(args, block.batch_idx);
  const auto dK_gmem = tile::key_rows<Element, features>(args.dK, sequence, block.head_idx).from(kv_begin);
  const auto dV_gmem = tile::key_rows<Element, features>(args.dV, sequence, block.head_idx).from(kv_begin);
  load_tile<dim, threads>(storage.own[0],
                          tile::key_rows<const Element, features>(args.K, sequence, block.head_idx).from(kv_begin));
  load_tile<dim, threads>(storage.own[1],
                          tile::key_rows<const Element, features>(args.V, sequence, block.head_idx).from(kv_begin));

  tile::Four dK[rows]{}, dV[rows]{};
  for (int head_idx = block.head_idx * args.group; head_idx < (block.head_idx + 1) * args.group; ++head_idx) {
    const auto Q_gmem = tile::query_rows<const Element, features>(args.Q, sequence, head_idx);
    const auto dO_gmem = tile::query_rows<const Element, features>(args.dO, sequence, head_idx);
    const long long statistics = tile::statistics_offset<features>(args, sequence, head_idx);
    const int first_query = begin_of_queries<features>(args, kv_begin) / block_q * block_q;
    for (int q_begin = first_query; q_begin < args.seq_q; q_begin += block_q) {
      __syncthreads();  // every warp is done with the previous tile
      load_tile<dim, threads>(storage.tile[0], Q_gmem.from(q_begin));
      load_tile<dim, threads>(storage.tile[1], dO_gmem.from(q_begin));
      __syncthreads();  // the tile is there for every warp

      float S[rows]{}, dP[rows]{};
      dot_products<dim>(S, dP, storage, warp_row, lane);
      const int i = q_begin + lane;
      const float lse = i < args.seq_q ? usable(args.lse[statistics + i]) : tile::infinity;
      const float delta = i < args.seq_q ? delta_of(args, statistics)[i] : 0;
#pragma unroll
      for (int r = 0; r < rows; ++r) {
        const bool visible = kv_begin + warp_row + r < end_of_keys<features>(args, i);
        const float P = visible ? tile::exp(S[r] * args.scale - lse) : 0;
        ptx::store_shared(ptx::shared_address(&storage.weights[0][warp_row + r][lane]), P * (dP[r] - delta));
        ptx::store_shared(ptx::shared_address(&storage.weights[1][warp_row + r][lane]), P);
      }
      __syncwarp();  // the warp's rows of dS and P are in shared memory
      if (column < dim) add_rows(dK, storage.weights[0], storage.tile[0], warp_row, column);
      if (column < dim) add_rows(dV, storage.weights[1], storage.tile[1], warp_row, column);
    }
  }
#pragma unroll
  for (int r = 0; r < rows; ++r) {
    if (warp_row + r >= dK_gmem.count || column >= dim) continue;
    store_four(dK_gmem.row(warp_row + r) + column, dK[r], args.scale);
    store_four(dV_gmem.row(warp_row + r) + column, dV[r], 1);
  }
}

}  // namespace flash_attention
