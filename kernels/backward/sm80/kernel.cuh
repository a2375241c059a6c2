#pragma once

#include "backward/query_sums.cuh"
#include "backward/repair.cuh"
#include "backward/sm80/products.cuh"
#include "backward/sm80/shape.cuh"
#include "ptx/path.cuh"

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
//                   (if every run must have the same bits, backward_sm80_dq computes dQ instead: sm80_dq.cuh)
//   dK, dV -> shared -> global; repair of keys that 0 * NaN has reached                  finish
//
// Workspace: delta (backward/delta.cuh), the fp32 sums of dQ, in the order in which threads hold them (QuerySums).

namespace flash_attention {

/// The work tile of a thread block: dK and dV of block_kv keys of one key head.
template <BackwardConfig config>
struct BackwardSm80 {
  using Shape = BackwardSm80Shape<config>;
  static constexpr Type type = Shape::type;
  static constexpr Features features = config.features;
  static constexpr int block_q = Shape::block_q, block_kv = Shape::block_kv, threads = Shape::threads;
  static constexpr int dim = Shape::dim, dim_v = Shape::dim_v;
  using Element = typename Shape::Element;
  using QTile = typename Shape::QTile;
  using dOTile = typename Shape::dOTile;
  using KTile = typename Shape::KTile;
  using VTile = typename Shape::VTile;
  using PTile = typename Shape::PTile;
  using Score = tile::Score<features>;
  using Visibility = tile::Visibility<features>;
  static constexpr bool adds_dQ = config.dq_mode != DqMode::separate_kernel;

  // How the warps divide the products of scores: rows x columns of warps.
  static constexpr int score_m = Shape::warps_q, score_n = config.num_warps / score_m;
  static constexpr int score_blocks = block_kv / score_n / 8;

  // How the warps divide the products of dK and dV: rows x columns of warps.
  static constexpr int key_m = Shape::warps_kv, key_n = config.num_warps / key_m;
  static constexpr int dK_pairs = tile::ceil_div(dim / 16, key_n), dV_pairs = tile::ceil_div(dim_v / 16, key_n);

  struct SharedStorage {
    KTile K;                                          // then dK
    VTile V;                                          // then dV
    typename Shape::Stage stages[config.num_stages];  // one or two
    PTile P_dS[Shape::fp32_products ? 1 : 2];  // one after the other in one place, or both
    SharedFlag repair;  // something in dK or dV is not finite
  };

  const AttentionArgs& args;
  SharedStorage& storage;
  const tile::Sequence sequence;
  const int kv_head_idx, kv_begin;
  const tile::TileRange tiles;  // of queries that see some of the keys
  const int thread = threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const tile::LanePlace place{lane};
  const unsigned K_smem = ptx::shared_address(&storage.K), V_smem = ptx::shared_address(&storage.V);
  float dK[2][2 * dK_pairs][4]{};
  float dV[2][2 * dV_pairs][4]{};

  tile::VisibleTiles visible_tiles;
  const unsigned P_smem = ptx::shared_address(&storage.P_dS[0]),
                 dS_smem = ptx::shared_address(&storage.P_dS[Shape::fp32_products ? 0 : 1]),
                 stages_smem = ptx::shared_address(&storage.stages);

  __device__ __forceinline__ BackwardSm80(const AttentionArgs& arguments, SharedStorage& shared, const tile::Sequence& s,
                                          int kv_head, int first_key)
      : args(arguments),
        storage(shared),
        sequence(s),
        kv_head_idx(kv_head),
        kv_begin(first_key),
        tiles(Visibility(arguments, s, kv_head * arguments.group).template query_tiles<block_q, block_kv>(first_key)) {}

  /// A step of the main loop: a query tile of a query head of the group.
  struct Step {
    int head_idx;
    int tile_idx;
    unsigned stage_smem;  // the address of its Q; dO, lse and delta follow
    __device__ __forceinline__ unsigned Q() const { return stage_smem; }
    __device__ __forceinline__ unsigned dO() const { return stage_smem + sizeof(QTile); }
    __device__ __forceinline__ unsigned statistics() const { return dO() + sizeof(dOTile); }
  };
  /// The first step, from a place on, of which the masks show something.
  __device__ __forceinline__ Step step_from(int head_idx, int tile_idx, unsigned stage_smem) {
    if constexpr (Visibility::skips_tiles) {
      while (head_idx < (kv_head_idx + 1) * args.group) {
        const Visibility sight(args, sequence, head_idx);
        tile_idx = visible_tiles.next(tile_idx, tiles.end, [&](int other) {
          return other >= tiles.begin && other < tiles.end &&
                 !sight.template masks_hide<block_q, block_kv>(other * block_q, kv_begin);
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

  using Scores = float[2][score_blocks][4];

  /// Computes P and dS of the warp's part of the score tile. S and dP are zeros at the call.
  __device__ __forceinline__ void score_tile(const Step& step, Scores& S, Scores& dP) const {
    const int head_idx = step.head_idx, q_begin = step.tile_idx * block_q;
    const int row = warp / score_n * 32, column = warp % score_n * score_blocks * 8;
    const Score score(args, sequence, head_idx);

    sm80::multiply_rows<features, QTile, KTile, dim, true>(S, step.Q(), row, K_smem, column, lane);
    sm80::multiply_rows<features, dOTile, VTile, dim_v, false>(dP, step.dO(), row, V_smem, column, lane);

    const typename Shape::template RowStatistics<2> rows(step.statistics(), row + place.row);
    const tile::Dropout dropout(args, sequence.batch_idx, head_idx);
    if (Shape::some_hidden(score.sight, q_begin, kv_begin)) {
      ptx::path<Shape::split    ? "backward/tf32 edge tile"
                : Shape::floats ? "backward/fp32 edge tile"
                                : "backward/sm80 edge tile">();
      Shape::template differentiate<true>(S, dP, score, rows, dropout, q_begin + row, kv_begin + column, place);
    } else {
      ptx::path<Shape::split    ? "backward/tf32 inner tile"
                : Shape::floats ? "backward/fp32 inner tile"
                                : "backward/sm80 inner tile">();
      Shape::template differentiate<false>(S, dP, score, rows, dropout, q_begin + row, kv_begin + column, place);
    }
  }
  /// Stores the warp's part of P or dS to shared memory.
  __device__ __forceinline__ void put_weights(const Scores& weights, unsigned address) const {
    Shape::template store<PTile>(weights, address, warp / score_n * 32, warp % score_n * score_blocks * 8, place);
  }

  /// dV += P^T dO or dK += dS^T Q, 32 keys and a part of the columns a warp.
  template <typename Tile, int pairs, int columns, int blocks>
  __device__ __forceinline__ void contract(float (&C)[2][blocks][4], unsigned weights, unsigned tile) const {
    const int row = warp / key_n * 32, part = warp % key_n;
    sm80::multiply_columns<features, PTile, Tile, block_q>(C, weights, row, tile, part * pairs, lane,
                                                           sm80::pairs_of<type, columns / 16, pairs, key_n>(part));
  }
  __device__ __forceinline__ void add_value_gradients(const Step& step) {
    contract<dOTile, dV_pairs, dim_v>(dV, P_smem, step.dO());
  }
  __device__ __forceinline__ void add_key_gradients(const Step& step) {
    contract<QTile, dK_pairs, dim>(dK, dS_smem, step.Q());
  }

  /// dQ = dS K, added to the workspace.
  __device__ __forceinline__ void add_query_gradients(const Step& step) const {
    using Sums = QuerySums<config>;
    float dQ[2][2 * Sums::pairs][4]{};
    const int row = warp / Sums::warps_n * 32, part = warp % Sums::warps_n;
    sm80::multiply<features, PTile, KTile, block_kv>(dQ, dS_smem, row, K_smem, part * Sums::pairs, lane,
                                                     sm80::pairs_of<type, dim / 16, Sums::pairs, Sums::warps_n>(part));
    if constexpr (Shape::fp32_products) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (auto& block : dQ[m]) {
#pragma unroll
          for (float& element : block) element *= Shape::query_scale;
        }
      }
    }
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
      Scores P{}, dS{};
      score_tile(step, P, dS);
      put_weights(P, P_smem);
      if constexpr (!Shape::fp32_products) put_weights(dS, dS_smem);
      __syncthreads();  // P and dS are ready for every warp
      add_value_gradients(step);
      if constexpr (Shape::fp32_products) {
        __syncthreads();  // every warp is done with P
        put_weights(dS, dS_smem);
        __syncthreads();  // dS is ready for every warp
      }
      add_key_gradients(step);
      if constexpr (adds_dQ) add_query_gradients(step);
      if (config.num_stages == 1 && exists(next)) {
        __syncthreads();  // every warp is done with the only stage
        load_queries(next);
      }
      step = next;
    }
  }

  // -- the end of the tile ------------------------------------------------------------------------------------------------

  /// Stores the warp's part of dK or dV to shared memory, over K or V. Returns whether an element is not finite.
  template <typename Tile, int pairs, int blocks>
  __device__ __forceinline__ bool put(const float (&C)[2][blocks][4], unsigned tile_address, float factor,
                                      int total_pairs) const {
    const int row = warp / key_n * 32, first = warp % key_n * pairs;
    // Keys that no query sees get 0: the zeros of their P and dS may have been multiplied by NaN or Inf of a query.
    constexpr bool some_unseen = features.key_lengths || features.seqused_kv;
    const auto unseen = [&](int r) { return some_unseen && kv_begin + r >= sequence.visible_kv; };
    float check = 0;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < blocks; ++n) {
        if (first + n / 2 >= total_pairs) break;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float a = C[m][n][2 * half] * factor, b = C[m][n][2 * half + 1] * factor;
          const int key = row + (Shape::fp32_products ? 4 * place.row + 2 * m + half : 16 * m + place.row + 8 * half);
          if (unseen(key)) a = b = 0;
          check = ptx::fma(a, 0, ptx::fma(b, 0, check));
          Shape::template put_result<Tile>(tile_address, key, 2 * first + n, place, a, b);
        }
      }
    }
    return check != check;
  }

  /// Writes dK and dV by way of shared memory, 16 bytes a lane; then repairs keys that 0 * NaN has reached.
  __device__ __forceinline__ void finish() const {
    if (thread == 0) storage.repair.set(false);
    __syncthreads();  // every warp is done with K and V, and the flag is down
    const float V_factor = (features.dropout ? args.keep_scale : 1) / Shape::weight_scale;
    const bool K_fails = put<KTile, dK_pairs>(dK, K_smem, args.scale / Shape::weight_scale, dim / 16);
    const bool V_fails = put<VTile, dV_pairs>(dV, V_smem, V_factor, dim_v / 16);
    if (Shape::repairs_rows && (K_fails || V_fails)) storage.repair.set(true);
    __syncthreads();  // dK, dV and the flag are in shared memory
    const auto dK_rows = tile::key_rows<Element, features>(args.dK, sequence, kv_head_idx).from(kv_begin);
    const auto dV_rows = tile::key_rows<Element, features>(args.dV, sequence, kv_head_idx).from(kv_begin);
    tile::store_tile<threads, config.head_dim, block_kv, KTile>(K_smem, 0, dK_rows, thread);
    tile::store_tile<threads, config.head_dim_v, block_kv, VTile>(V_smem, 0, dV_rows, thread);
    if constexpr (Shape::repairs_rows) {
      if (storage.repair.up()) {
        ptx::path<Shape::split    ? "backward/tf32 repaired keys"
                  : Shape::floats ? "backward/fp32 repaired keys"
                                  : "backward/sm80 repaired keys">();
        __syncthreads();  // the stores above must come before those of the repair
        for (int j = kv_begin + warp; j < tile::min(kv_begin + block_kv, sequence.visible_kv); j += config.num_warps) {
          repair_key<config>(args, sequence, kv_head_idx, j,
                             [&](int head_idx) { return delta_like_lse<config>(args, sequence, head_idx); });
        }
      }
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
