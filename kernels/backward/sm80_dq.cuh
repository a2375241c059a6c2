#pragma once

#include "backward/query_sums.cuh"
#include "backward/repair.cuh"
#include "backward/sm80/products.cuh"
#include "ptx/path.cuh"

// dQ of the sm80 backward pass, in one of two ways.
//
//   backward_sm80_finish_dq   rounds the sums that backward_sm80 has made in the workspace
//   backward_sm80_dq          computes dQ by itself: the same bits in every run, at the price of two more products
//
// A block of backward_sm80_dq takes block_q queries of one head:
//
//     for each key tile:    K, V -> shared                            load_keys
//       S = Q K^T,  dP = dO V^T,  P = exp(S - lse),  dS = P * (dP - delta),  dQ += dS K      add_tile
//     dQ * scale -> shared -> global                                  finish

namespace flash_attention {

using namespace abi;

/// Repairs rows of dQ that are not finite. Every thread of the block calls it after the rows have been stored.
template <BackwardConfig config>
__device__ __forceinline__ void repair_queries(const AttentionArgs& args, const tile::Sequence& sequence, int head_idx,
                                               int q_begin, bool needed) {
  if (!needed) return;
  using Shape = BackwardSm80Shape<config>;
  ptx::path<Shape::split    ? "backward/tf32 repaired queries"
            : Shape::floats ? "backward/fp32 repaired queries"
                            : "backward/sm80 repaired queries">();
  const tile::Visibility<config.features> sight(args, sequence, head_idx);
  const auto tiles = sight.template key_tiles<config.block_q, config.block_kv>(q_begin);
  __syncthreads();  // the stores of the tile must come before those of the repair
  for (int i = q_begin + static_cast<int>(threadIdx.x) / 32; i < tile::min(q_begin + config.block_q, sequence.len_q);
       i += config.num_warps) {
    repair_query<config>(args, sequence, head_idx, i, tiles.begin * config.block_kv, tiles.end * config.block_kv);
  }
}

template <BackwardConfig config>
struct FinishStorage {
  typename BackwardSm80Shape<config>::QTile dQ;
  SharedFlag repair;
};

/// A block takes a tile of block_q queries.
template <BackwardConfig config>
__device__ __forceinline__ void backward_sm80_finish_dq(const AttentionArgs& args) {
  using Shape = BackwardSm80Shape<config>;
  using Sums = QuerySums<config>;
  using QTile = typename Shape::QTile;
  auto& storage = ptx::shared_storage<FinishStorage<config>>();
  const auto block = tile::query_block(blockIdx.x, tile::ceil_div(args.seq_q, config.block_q), args.heads_q);
  const tile::Sequence sequence = tile::make_sequence<config.features>(args, block.batch_idx);
  const int q_begin = block.tile_idx * config.block_q, thread = threadIdx.x, warp = thread / 32;
  if (q_begin >= sequence.rows_q) return;
  if (thread == 0) storage.repair.set(false);
  __syncthreads();  // the flag is down

  float dQ[2][Sums::blocks][4];
  Sums::read(Sums::of_thread(args, sequence, block.head_idx, block.tile_idx), dQ);
  const unsigned dQ_smem = ptx::shared_address(&storage.dQ);
  const tile::LanePlace place(thread % 32);
  const int row = warp / Sums::warps_n * 32, part = warp % Sums::warps_n;
  // Rows past the used length get 0: the zeros of their dS may have been multiplied by NaN or Inf of a key.
  const auto unused = [&](int r) { return config.features.seqused_q && q_begin + r >= sequence.len_q; };
  const float scale = args.scale / Shape::query_scale;
  float check = 0;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < Sums::blocks; ++n) {
      const int chunk = part * Sums::blocks + n;
      if (chunk >= Shape::dim / 8) break;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float a = dQ[m][n][2 * half] * scale, b = dQ[m][n][2 * half + 1] * scale;
        if (unused(row + 16 * m + place.row + 8 * half)) a = b = 0;
        check = ptx::fma(a, 0, ptx::fma(b, 0, check));
        Shape::template put_result<QTile>(dQ_smem, row + 16 * m + place.row + 8 * half, chunk, place, a, b);
      }
    }
  }
  if (check != check) storage.repair.set(true);
  __syncthreads();  // dQ and the flag are in shared memory
  const auto to =
      tile::query_rows<typename Shape::Element, config.features>(args.dQ, sequence, block.head_idx).from(q_begin);
  tile::store_tile<Shape::threads, config.head_dim, config.block_q, QTile>(dQ_smem, 0, to, thread);
  if constexpr (Shape::repairs_rows) repair_queries<config>(args, sequence, block.head_idx, q_begin, storage.repair.up());
}

/// A block takes block_q queries of one head, 16 for each warp. dS goes from one product to the next in registers, or
/// in fp32 through shared memory, in rows that belong to the warp.
template <BackwardConfig config>
struct BackwardSm80Query {
  using Shape = BackwardSm80Shape<config>;
  static constexpr Features features = config.features;
  static constexpr int block_q = Shape::block_q, block_kv = Shape::block_kv, dim = Shape::dim, dim_v = Shape::dim_v;
  using Element = typename Shape::Element;
  using QTile = typename Shape::QTile;
  using dOTile = typename Shape::dOTile;
  using KTile = typename Shape::KTile;
  using VTile = typename Shape::VTile;
  static_assert(block_q == 16 * config.num_warps, "a warp takes 16 queries");

  struct SharedStorage {
    QTile Q;  // then dQ
    dOTile dO;
    KTile K;
    VTile V;
    SharedFlag repair;
  };

  const AttentionArgs& args;
  const tile::Sequence sequence;
  const int head_idx, q_begin;
  const int lane = threadIdx.x % 32, warp_row = static_cast<int>(threadIdx.x) / 32 * 16;
  const tile::LanePlace place{lane};
  const unsigned Q_smem, dO_smem, K_smem, V_smem;
  const unsigned dS_smem;  // for products in fp32: after the storage, in memory that the planner reserves
  float dQ[1][dim / 8][4]{};

  __device__ __forceinline__ BackwardSm80Query(const AttentionArgs& arguments, SharedStorage& storage,
                                               const tile::Sequence& s, int head, int first_query)
      : args(arguments),
        sequence(s),
        head_idx(head),
        q_begin(first_query),
        Q_smem(ptx::shared_address(&storage.Q)),
        dO_smem(ptx::shared_address(&storage.dO)),
        K_smem(ptx::shared_address(&storage.K)),
        V_smem(ptx::shared_address(&storage.V)),
        dS_smem(ptx::shared_address(&storage) + static_cast<unsigned>(sizeof(SharedStorage))) {}

  __device__ __forceinline__ void load_keys(int kv_begin) const {
    const int kv_head_idx = head_idx / args.group;
    Shape::template load<KTile, config.head_dim>(Shape::keys(args.K, sequence, kv_head_idx).from(kv_begin), K_smem);
    Shape::template load<VTile, config.head_dim_v>(Shape::keys(args.V, sequence, kv_head_idx).from(kv_begin), V_smem);
    ptx::copy_async_commit();
  }

  __device__ __forceinline__ void add_tile(const tile::Score<features>& score,
                                           const typename Shape::template RowStatistics<1>& rows, int kv_begin) {
    float S[1][block_kv / 8][4]{}, dP[1][block_kv / 8][4]{};
    sm80::multiply_rows<features, QTile, KTile, dim, true>(S, Q_smem, warp_row, K_smem, 0, lane);
    sm80::multiply_rows<features, dOTile, VTile, dim_v, false>(dP, dO_smem, warp_row, V_smem, 0, lane);
    const tile::Dropout dropout(args, sequence.batch_idx, head_idx);
    if (Shape::some_hidden(score.sight, q_begin, kv_begin)) {
      ptx::path<Shape::split    ? "backward/tf32 edge tile of dQ"
                : Shape::floats ? "backward/fp32 edge tile of dQ"
                                : "backward/sm80 edge tile of dQ">();
      Shape::template differentiate<true>(S, dP, score, rows, dropout, q_begin + warp_row, kv_begin, place);
    } else {
      ptx::path<Shape::split    ? "backward/tf32 inner tile of dQ"
                : Shape::floats ? "backward/fp32 inner tile of dQ"
                                : "backward/sm80 inner tile of dQ">();
      Shape::template differentiate<false>(S, dP, score, rows, dropout, q_begin + warp_row, kv_begin, place);
    }
    if constexpr (Shape::fp32_products) {
      using dSTile = typename Shape::PTile;
      __syncwarp();  // all lanes have read dS of the tile before
      Shape::template store<dSTile>(dP, dS_smem, warp_row, 0, place);
      __syncwarp();  // all lanes have written dS
      sm80::multiply<features, dSTile, KTile, block_kv>(dQ, dS_smem, warp_row, K_smem, 0, lane, dim / 16);
    } else {
      sm80::multiply_registers<features, KTile>(dQ, dP, K_smem, lane);
    }
  }

  __device__ __forceinline__ void differentiate_tiles(const tile::Score<features>& score, const tile::TileRange& tiles) {
    const typename Shape::template RowStatistics<1> rows(args, sequence, head_idx, q_begin + warp_row + place.row);
    Shape::template load<QTile, config.head_dim>(Shape::queries(args.Q, sequence, head_idx).from(q_begin), Q_smem);
    Shape::template load<dOTile, config.head_dim_v>(Shape::queries(args.dO, sequence, head_idx).from(q_begin), dO_smem);
    tile::VisibleTiles visible_tiles;
#pragma unroll 1
    for (int tile_idx = tiles.begin; tile_idx < tiles.end; ++tile_idx) {
      if constexpr (tile::Visibility<features>::skips_tiles) {
        tile_idx = visible_tiles.next(tile_idx, tiles.end, [&](int other) {
          return other < tiles.end && !score.sight.template masks_hide<block_q, block_kv>(q_begin, other * block_kv);
        });
        if (tile_idx == tiles.end) break;
      }
      __syncthreads();  // every warp is done with the tile before
      load_keys(tile_idx * block_kv);
      ptx::copy_async_wait<0>();
      __syncthreads();  // the tile has landed
      add_tile(score, rows, tile_idx * block_kv);
    }
    if constexpr (tile::Visibility<features>::skips_tiles) {
      ptx::copy_async_commit();
      ptx::copy_async_wait<0>();
      __syncthreads();  // Q and dO have landed, even if every tile was skipped: dQ overwrites them
    }
  }

  /// Writes dQ through the warp's own rows of shared memory to global memory. Returns whether an element is not finite.
  __device__ __forceinline__ bool finish() {
    float check = 0;
#pragma unroll
    for (int n = 0; n < dim / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        dQ[0][n][e] *= args.scale / Shape::weight_scale;
        // As in backward_sm80_finish_dq.
        if (features.seqused_q && q_begin + warp_row + place.row + e / 2 * 8 >= sequence.len_q) dQ[0][n][e] = 0;
        check = ptx::fma(dQ[0][n][e], 0, check);
      }
    }
    __syncwarp();  // every lane has read its Q
    Shape::template store_result<QTile>(dQ, Q_smem, warp_row, 0, place);
    __syncwarp();  // the warp's rows are in shared memory
    const auto to = tile::query_rows<Element, features>(args.dQ, sequence, head_idx).from(q_begin);
    tile::store_tile<32, config.head_dim, 16, QTile>(Q_smem, warp_row, to, lane);
    return check != check;
  }
};

template <BackwardConfig config>
__device__ __forceinline__ void backward_sm80_dq(const AttentionArgs& args) {
  using Kernel = BackwardSm80Query<config>;
  auto& storage = ptx::shared_storage<typename Kernel::SharedStorage>();
  const int num_tiles = tile::ceil_div(args.seq_q, config.block_q);
  const int block_idx = tile::by_work<config.features>(blockIdx.x, gridDim.x, num_tiles, args.seq_kv);
  const auto block = tile::query_block(block_idx, num_tiles, args.heads_q);
  const tile::Sequence sequence = tile::make_sequence<config.features>(args, block.batch_idx);
  const int q_begin = block.tile_idx * config.block_q;
  if (q_begin >= sequence.rows_q) return;
  if (threadIdx.x == 0) storage.repair.set(false);  // the barriers of the loop come before any thread raises it

  Kernel kernel(args, storage, sequence, block.head_idx, q_begin);
  const tile::Score<config.features> score(args, sequence, block.head_idx);
  const auto tiles = score.sight.template key_tiles<config.block_q, config.block_kv>(q_begin);
  if (tiles.begin < tiles.end) kernel.differentiate_tiles(score, tiles);
  if (kernel.finish()) storage.repair.set(true);
  if constexpr (Kernel::Shape::repairs_rows) {
    __syncthreads();  // the flag has its final value
    repair_queries<config>(args, sequence, block.head_idx, q_begin, storage.repair.up());
  }
}

}  // namespace flash_attention
