#pragma once

#include "backward/query_sums.cuh"
#include "backward/sm80/epilogue.cuh"
#include "backward/sm80/products.cuh"

// Attention backward with mma.sync and cp.async: sm_80 and up, 16-bit types, the whole contract.
//
// A thread block takes one work tile: block_kv keys of one key head. It loops over the query tiles of each query head of
// the group. The eight warps divide each product in their own way; P and dS go through shared memory between them.
//
//   K, V -> shared
//   for each query head of the group, each tile of block_q queries (the next one is prefetched):
//     S = Q K^T,  dP = dO V^T                   registers, 32 rows per warp              score_tile
//     P = exp(S - lse),  dS = P (dP - delta)    registers -> shared                      sm80/shape.cuh
//     dV += P^T dO,  dK += dS^T Q               registers, 32 keys per warp              add_key_gradients
//     dQ  = dS K -> added to fp32 in the workspace                                       add_query_gradients
//                   (a result that must be the same in every run has dQ by backward_sm80_dq, sm80_dq.cuh)
//   dK, dV -> shared -> global                                                           sm80/epilogue.cuh
//
// Workspace: delta (backward/delta.cuh), the fp32 sums of dQ, in the order in which threads hold them (QuerySums).

namespace flash_attention {

template <BackwardConfig config>
struct BackwardSm80 : BackwardSm80Epilogue<config> {
  using Base = BackwardSm80Epilogue<config>;
  using Shape = BackwardSm80Shape<config>;
  using Base::args, Base::sequence, Base::kv_head_idx, Base::kv_begin, Base::tiles, Base::lane, Base::warp, Base::place,
      Base::K_smem, Base::V_smem, Base::dK, Base::dV;
  using Base::type, Base::features, Base::block_q, Base::block_kv, Base::dim, Base::dim_v, Base::key_n, Base::dK_pairs,
      Base::dV_pairs;
  using typename Shape::QTile, typename Shape::dOTile, typename Shape::KTile, typename Shape::VTile, typename Shape::PTile,
      typename Base::SharedStorage, typename Base::Score;
  static constexpr bool adds_dQ = config.dq_mode != DqMode::separate_kernel;

  // How the warps divide the products of scores: rows x columns of warps.
  static constexpr int score_m = Shape::warps_q, score_n = config.num_warps / score_m;
  static constexpr int score_blocks = block_kv / score_n / 8;

  tile::VisibleTiles visible_tiles;
  const unsigned P_smem, dS_smem, stages_smem;

  __device__ __forceinline__ BackwardSm80(const AttentionArgs& arguments, SharedStorage& shared, const tile::Sequence& s,
                                          int kv_head, int first_key)
      : Base(arguments, shared, s, kv_head, first_key),
        P_smem(ptx::shared_address(&shared.P)),
        dS_smem(ptx::shared_address(&shared.dS)),
        stages_smem(ptx::shared_address(&shared.stages)) {}

  /// A step of the main loop: a query tile of a query head of the group.
  struct Step {
    int head_idx;
    int tile_idx;
    unsigned stage_smem;  // the address of its Q; dO, lse and delta follow
    __device__ __forceinline__ unsigned Q() const { return stage_smem; }
    __device__ __forceinline__ unsigned dO() const { return stage_smem + sizeof(QTile); }
    __device__ __forceinline__ unsigned statistics() const { return dO() + sizeof(dOTile); }
  };
  /// The first step from a place on of which the masks show something.
  __device__ __forceinline__ Step step_from(int head_idx, int tile_idx, unsigned stage_smem) {
    if constexpr (Score::skips_tiles) {
      while (head_idx < (kv_head_idx + 1) * args.group) {
        const Score score(args, sequence, head_idx);
        tile_idx = visible_tiles.next(tile_idx, tiles.end, [&](int other) {
          return other >= tiles.begin && other < tiles.end &&
                 !score.template masks_hide<block_q, block_kv>(other * block_q, kv_begin);
        });
        if (tile_idx < tiles.end) break;
        ++head_idx, tile_idx = tiles.begin, visible_tiles = {};  // another head may have another map
      }
    }
    return {head_idx, tile_idx, stage_smem};
  }
  __device__ __forceinline__ Step first_step() { return step_from(kv_head_idx * args.group, tiles.begin, stages_smem); }
  __device__ __forceinline__ Step after(const Step& step) {
    const bool last = step.tile_idx + 1 == tiles.end;
    if (last) visible_tiles = {};  // the next head may have another map
    const unsigned other = 2 * stages_smem + static_cast<unsigned>(sizeof(typename Shape::Stage)) - step.stage_smem;
    return step_from(step.head_idx + last, last ? tiles.begin : step.tile_idx + 1,
                     config.num_stages > 1 ? other : step.stage_smem);
  }
  __device__ __forceinline__ bool exists(const Step& step) const { return step.head_idx < (kv_head_idx + 1) * args.group; }

  __device__ __forceinline__ void load_keys() const {
    Shape::template load<KTile, config.head_dim>(Shape::keys(args.K, sequence, kv_head_idx).from(kv_begin), K_smem);
    Shape::template load<VTile, config.head_dim_v>(Shape::keys(args.V, sequence, kv_head_idx).from(kv_begin), V_smem);
  }
  __device__ __forceinline__ void load_queries(const Step& step) const {
    const int head_idx = step.head_idx, q_begin = step.tile_idx * block_q;
    Shape::template load<QTile, config.head_dim>(Shape::queries(args.Q, sequence, head_idx).from(q_begin), step.Q());
    Shape::template load<dOTile, config.head_dim_v>(Shape::queries(args.dO, sequence, head_idx).from(q_begin), step.dO());
    Shape::load_statistics(args, sequence, head_idx, q_begin, step.statistics());
    ptx::copy_async_commit();
  }

  /// P and dS of the warp's part of the score tile, into shared memory.
  __device__ __forceinline__ void score_tile(const Step& step) const {
    const int head_idx = step.head_idx, q_begin = step.tile_idx * block_q;
    const int row = warp / score_n * 32, column = warp % score_n * score_blocks * 8;
    const Score score(args, sequence, head_idx);

    float S[2][score_blocks][4]{}, dP[2][score_blocks][4]{};
    sm80::multiply_rows<features, QTile, KTile, dim>(S, step.Q(), row, K_smem, column, lane);
    sm80::multiply_rows<features, dOTile, VTile, dim_v>(dP, step.dO(), row, V_smem, column, lane);

    const typename Shape::template RowStatistics<2> rows(step.statistics(), row + place.row);
    const tile::Dropout dropout(args, sequence.batch_idx, head_idx);
    if (Shape::some_hidden(score, q_begin, kv_begin)) {
      ptx::path<Shape::split ? "backward/tf32 edge tile" : "backward/sm80 edge tile">();
      Shape::template differentiate<true>(S, dP, score, rows, dropout, q_begin + row, kv_begin + column, place);
    } else {
      ptx::path<Shape::split ? "backward/tf32 inner tile" : "backward/sm80 inner tile">();
      Shape::template differentiate<false>(S, dP, score, rows, dropout, q_begin + row, kv_begin + column, place);
    }
    Shape::template store<PTile>(S, P_smem, row, column, place);
    Shape::template store<PTile>(dP, dS_smem, row, column, place);
  }

  /// dV += P^T dO and dK += dS^T Q, 32 keys and a part of the columns a warp.
  __device__ __forceinline__ void add_key_gradients(const Step& step) {
    const int row = warp / key_n * 32, part = warp % key_n;
    const auto contract = [&]<typename Tile, int pairs, int columns, int blocks>(float(&C)[2][blocks][4], unsigned weights,
                                                                                 unsigned tile) {
      sm80::multiply_columns<features, PTile, Tile, block_q>(C, weights, row, tile, part * pairs, lane,
                                                             sm80::pairs_of<type, columns / 16, pairs, key_n>(part));
    };
    contract.template operator()<dOTile, dV_pairs, dim_v>(dV, P_smem, step.dO());
    contract.template operator()<QTile, dK_pairs, dim>(dK, dS_smem, step.Q());
  }

  /// dQ = dS K, added to the workspace.
  __device__ __forceinline__ void add_query_gradients(const Step& step) const {
    using Sums = QuerySums<config>;
    float dQ[2][2 * Sums::pairs][4]{};
    const int row = warp / Sums::warps_n * 32, part = warp % Sums::warps_n;
    sm80::multiply<features, PTile, KTile, block_kv>(dQ, dS_smem, row, K_smem, part * Sums::pairs, lane,
                                                     sm80::pairs_of<type, dim / 16, Sums::pairs, Sums::warps_n>(part));
    Sums::add(Sums::of_thread(args, sequence, step.head_idx, step.tile_idx), dQ);
  }

  __device__ __forceinline__ void differentiate_tiles() {
    Step step = first_step();
    if (!exists(step)) return;
    load_keys();
    load_queries(step);
#pragma unroll 1
    while (exists(step)) {
      const Step next = after(step);
      ptx::copy_async_wait<0>();
      __syncthreads();  // the tile has landed; every warp is done with the one before, its P and its dS
      if (config.num_stages > 1 && exists(next)) load_queries(next);
      score_tile(step);
      __syncthreads();  // P and dS are ready for every warp
      add_key_gradients(step);
      if constexpr (adds_dQ) add_query_gradients(step);
      if (config.num_stages == 1 && exists(next)) {
        __syncthreads();  // every warp is done with the only stage
        load_queries(next);
      }
      step = next;
    }
  }
};

template <BackwardConfig config>
__device__ __forceinline__ void backward_sm80(const AttentionArgs& args) {
  using Kernel = BackwardSm80<config>;
  auto& storage = ptx::shared_storage<typename Kernel::SharedStorage>();
  const int num_tiles = tile::ceil_div(args.seq_kv, config.block_kv);
  const int block_idx = tile::by_work<config.features>(blockIdx.x, gridDim.x, num_tiles, args.seq_q * args.group);
  const auto block = tile::key_block(block_idx, num_tiles, args.heads_kv);
  const tile::Sequence sequence = tile::make_sequence<config.features>(args, block.batch_idx);
  const int kv_begin = block.tile_idx * config.block_kv;
  if (kv_begin >= sequence.rows_kv) return;

  Kernel kernel(args, storage, sequence, block.head_idx, kv_begin);
  if (kernel.tiles.begin < kernel.tiles.end) kernel.differentiate_tiles();
  kernel.finish();
}

}  // namespace flash_attention
