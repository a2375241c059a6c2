#pragma once

#include "backward/query_sums.cuh"
#include "backward/repair.cuh"
#include "backward/sm80_shape.cuh"

// Attention backward with mma.sync and cp.async: sm_80 and up, 16-bit types, the whole contract.
//
// A block takes block_kv keys of one key head and goes through the query tiles of each query head of the group. The eight
// warps divide each product in their own way; P and dS pass through shared memory between them.
//
//   K, V -> shared
//   for each query head of the group, each tile of block_q queries (the next one on its way):
//     S = Q K^T,  dP = dO V^T                   registers, 32 rows a warp
//     P = exp(S - lse),  dS = P (dP - delta)    registers -> shared
//     dV += P^T dO,  dK += dS^T Q               registers, 32 keys a warp
//     dQ  = dS K -> added to fp32 in the workspace    (not where the result must be the same in every run:
//     backward_sm80_dq)
//   dK, dV -> shared -> global
//
// Workspace: [0] delta (backward/delta.cuh), [1] the fp32 sums of dQ, in the order in which threads hold them (QuerySums).

namespace flash_attention {

using namespace abi;

template <BackwardConfig config>
struct BackwardSm80 : BackwardSm80Shape<config> {
  using Shape = BackwardSm80Shape<config>;
  using Shape::type, Shape::features, Shape::block_q, Shape::block_kv, Shape::threads, Shape::dim, Shape::dim_v;
  using typename Shape::Element, typename Shape::QTile, typename Shape::dOTile, typename Shape::KTile,
      typename Shape::VTile, typename Shape::PTile;
  using Score = tile::Score<features>;
  static constexpr bool adds_dQ = !config.deterministic;

  // How the warps divide the products: rows x columns of warps.
  static constexpr int score_m = Shape::warps_q, score_n = config.num_warps / score_m;
  static constexpr int score_blocks = block_kv / score_n / 8;
  static constexpr int key_m = Shape::warps_kv, key_n = config.num_warps / key_m;
  static constexpr int dK_pairs = tile::ceil_div(dim / 16, key_n), dV_pairs = tile::ceil_div(dim_v / 16, key_n);

  struct SharedStorage {
    KTile K;  // then dK
    VTile V;  // then dV
    struct {
      QTile Q;
      dOTile dO;
    } stages[config.num_stages];
    PTile P;
    PTile dS;
    bool repair;  // something in dK or dV is not finite
  };

  const AttentionArgs& args;
  SharedStorage& storage;
  const tile::Sequence sequence;
  const int kv_head_idx, kv_begin;
  const tile::TileRange tiles;
  const int thread = threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const tile::LanePlace place{lane};
  const unsigned K_smem, V_smem, P_smem, dS_smem, stage_smem;
  float dK[2][2 * dK_pairs][4]{};
  float dV[2][2 * dV_pairs][4]{};

  __device__ __forceinline__ BackwardSm80(const AttentionArgs& arguments, SharedStorage& shared, const tile::Sequence& s,
                                          int kv_head, int first_key)
      : args(arguments),
        storage(shared),
        sequence(s),
        kv_head_idx(kv_head),
        kv_begin(first_key),
        tiles(Score(arguments, s, kv_head * arguments.group).template query_tiles<block_q, block_kv>(first_key)),
        K_smem(ptx::shared_address(&storage.K)),
        V_smem(ptx::shared_address(&storage.V)),
        P_smem(ptx::shared_address(&storage.P)),
        dS_smem(ptx::shared_address(&storage.dS)),
        stage_smem(ptx::shared_address(&storage.stages)) {}

  /// Steps of the main loop: each query tile of each query head of the group.
  __device__ __forceinline__ int num_steps() const { return args.group * (tiles.end - tiles.begin); }
  __device__ __forceinline__ int head_of(int step) const {
    return kv_head_idx * args.group + step / (tiles.end - tiles.begin);
  }
  __device__ __forceinline__ int query_of(int step) const {
    return (tiles.begin + step % (tiles.end - tiles.begin)) * block_q;
  }
  __device__ __forceinline__ unsigned Q_smem(int step) const {
    return stage_smem + step % config.num_stages * Shape::stage_bytes;
  }
  __device__ __forceinline__ unsigned dO_smem(int step) const { return Q_smem(step) + sizeof(QTile); }

  __device__ __forceinline__ void load_keys() const {
    Shape::template load<KTile, config.head_dim>(Shape::keys(args.K, sequence, kv_head_idx).from(kv_begin), K_smem);
    Shape::template load<VTile, config.head_dim_v>(Shape::keys(args.V, sequence, kv_head_idx).from(kv_begin), V_smem);
  }
  __device__ __forceinline__ void load_queries(int step) const {
    const int head_idx = head_of(step), q_begin = query_of(step);
    Shape::template load<QTile, config.head_dim>(Shape::queries(args.Q, sequence, head_idx).from(q_begin), Q_smem(step));
    Shape::template load<dOTile, config.head_dim_v>(Shape::queries(args.dO, sequence, head_idx).from(q_begin),
                                                    dO_smem(step));
    ptx::copy_async_commit();
  }

  /// P and dS of the warp's part of the score tile, into shared memory.
  __device__ __forceinline__ void score_tile(int step) const {
    const int head_idx = head_of(step), q_begin = query_of(step);
    const int row = warp / score_n * 32, column = warp % score_n * score_blocks * 8;
    const Score score(args, sequence, head_idx);
    const typename Shape::template RowStatistics<2> rows(args, sequence, head_idx, q_begin + row + place.row);

    float S[2][score_blocks][4]{}, dP[2][score_blocks][4]{};
    const unsigned Q_address = tile::a_address<QTile>(Q_smem(step), row, lane);
    const unsigned K_address = tile::b_transposed_address<KTile>(K_smem, column, lane);
    tile::multiply<type, dim / 16>(
        S, [&](unsigned(&A)[4], int m, int k) { ptx::ldmatrix_x4(A, QTile::step(Q_address + m * 16 * 128, 2 * k)); },
        [&](unsigned(&B)[4], int n, int k) { ptx::ldmatrix_x4(B, KTile::step(K_address + n * 16 * 128, 2 * k)); });
    const unsigned dO_address = tile::a_address<dOTile>(dO_smem(step), row, lane);
    const unsigned V_address = tile::b_transposed_address<VTile>(V_smem, column, lane);
    tile::multiply<type, dim_v / 16>(
        dP, [&](unsigned(&A)[4], int m, int k) { ptx::ldmatrix_x4(A, dOTile::step(dO_address + m * 16 * 128, 2 * k)); },
        [&](unsigned(&B)[4], int n, int k) { ptx::ldmatrix_x4(B, VTile::step(V_address + n * 16 * 128, 2 * k)); });

    const tile::Dropout dropout(args, sequence.batch_idx, head_idx);
    if (Shape::some_hidden(score, q_begin, kv_begin)) {
      Shape::template differentiate<true>(S, dP, score, rows, dropout, q_begin + row, kv_begin + column, place);
    } else {
      Shape::template differentiate<false>(S, dP, score, rows, dropout, q_begin + row, kv_begin + column, place);
    }
    Shape::template store<PTile>(S, P_smem, row, column, place);
    Shape::template store<PTile>(dP, dS_smem, row, column, place);
  }

  /// dV += P^T dO and dK += dS^T Q, 32 keys and a part of the columns a warp.
  __device__ __forceinline__ void add_key_gradients(int step) {
    const int row = warp / key_n * 32, part = warp % key_n;
    const auto contract = [&]<typename Tile, int pairs, int blocks>(float(&C)[2][blocks][4], unsigned weights,
                                                                    unsigned tile, int total_pairs) {
      const unsigned A_address = tile::a_transposed_address<PTile>(weights, 0, lane);
      const unsigned B_address = tile::b_address<Tile>(tile, 0, lane);
      tile::multiply<type, block_q / 16>(
          C,
          [&](unsigned(&A)[4], int m, int k) {
            ptx::ldmatrix_x4_trans(A, PTile::step(A_address + k * 16 * 128, (row + 16 * m) / 8));
          },
          [&](unsigned(&B)[4], int n, int k) {
            ptx::ldmatrix_x4_trans(B, Tile::step(B_address + k * 16 * 128, 2 * (part * pairs + n)));
          },
          total_pairs % pairs == 0 ? pairs : total_pairs - part * pairs);
    };
    contract.template operator()<dOTile, dV_pairs>(dV, P_smem, dO_smem(step), dim_v / 16);
    contract.template operator()<QTile, dK_pairs>(dK, dS_smem, Q_smem(step), dim / 16);
  }

  /// dQ = dS K, added to the workspace.
  __device__ __forceinline__ void add_query_gradients(int step) const {
    using Sums = QuerySums<config>;
    float dQ[2][2 * Sums::pairs][4]{};
    const int row = warp / Sums::warps_n * 32, part = warp % Sums::warps_n;
    const unsigned A_address = tile::a_address<PTile>(dS_smem, row, lane);
    const unsigned B_address = tile::b_address<KTile>(K_smem, 0, lane);
    tile::multiply<type, block_kv / 16>(
        dQ, [&](unsigned(&A)[4], int m, int k) { ptx::ldmatrix_x4(A, PTile::step(A_address + m * 16 * 128, 2 * k)); },
        [&](unsigned(&B)[4], int n, int k) {
          ptx::ldmatrix_x4_trans(B, KTile::step(B_address + k * 16 * 128, 2 * (part * Sums::pairs + n)));
        },
        dim / 16 % Sums::pairs == 0 ? Sums::pairs : dim / 16 - part * Sums::pairs);
    Sums::add(Sums::of_thread(args, sequence, head_of(step), query_of(step) / block_q), dQ);
  }

  __device__ __forceinline__ void differentiate_tiles() {
    const int steps = num_steps();
    load_keys();
    load_queries(0);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      ptx::copy_async_wait<0>();
      __syncthreads();  // the tile has landed; every warp is done with the one before, its P and its dS
      if (config.num_stages > 1 && step + 1 < steps) load_queries(step + 1);
      score_tile(step);
      __syncthreads();  // P and dS are there for every warp
      add_key_gradients(step);
      if constexpr (adds_dQ) add_query_gradients(step);
      if (config.num_stages == 1 && step + 1 < steps) {
        __syncthreads();  // every warp is done with the only stage
        load_queries(step + 1);
      }
    }
  }

  /// The warp's part of dK or dV into shared memory, where K or V was; true if something in it is not finite.
  template <typename Tile, int pairs, int blocks>
  __device__ __forceinline__ bool put(const float (&C)[2][blocks][4], unsigned tile_address, float factor,
                                      int total_pairs) const {
    const int row = warp / key_n * 32, first = warp % key_n * pairs;
    float check = 0;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < blocks; ++n) {
        if (first + n / 2 >= total_pairs) break;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float a = C[m][n][2 * half] * factor, b = C[m][n][2 * half + 1] * factor;
          check = ptx::fma(a, 0, ptx::fma(b, 0, check));
          const unsigned offset = Tile::offset(row + 16 * m + place.row + 8 * half, 2 * first + n) + 2 * place.column;
          ptx::store_shared(tile_address + offset, ptx::pack<type>(a, b));
        }
      }
    }
    return check != check;
  }

  __device__ __forceinline__ void finish() const {
    if (thread == 0) storage.repair = false;
    __syncthreads();  // every warp is done with K and V, and the flag is down
    const bool K_fails = put<KTile, dK_pairs>(dK, K_smem, args.scale, dim / 16);
    const bool V_fails = put<VTile, dV_pairs>(dV, V_smem, features.dropout ? args.keep_scale : 1, dim_v / 16);
    if (Shape::careful && (K_fails || V_fails)) storage.repair = true;
    __syncthreads();  // dK, dV and the flag are in shared memory
    const auto dK_rows = tile::key_rows<Element, features>(args.dK, sequence, kv_head_idx).from(kv_begin);
    const auto dV_rows = tile::key_rows<Element, features>(args.dV, sequence, kv_head_idx).from(kv_begin);
    tile::store_tile<threads, config.head_dim, block_kv, KTile>(K_smem, 0, dK_rows, thread);
    tile::store_tile<threads, config.head_dim_v, block_kv, VTile>(V_smem, 0, dV_rows, thread);
    if constexpr (Shape::careful) {
      if (storage.repair) {
        __syncthreads();  // the stores above come before those of the repair
        for (int j = kv_begin + warp; j < tile::smaller(kv_begin + block_kv, sequence.visible_kv); j += config.num_warps) {
          repair_key<config>(args, sequence, kv_head_idx, j, tiles.begin * block_q, tiles.end * block_q);
        }
      }
    }
  }
};

template <BackwardConfig config>
__device__ __forceinline__ void backward_sm80(const AttentionArgs& args) {
  using Kernel = BackwardSm80<config>;
  auto& storage = ptx::shared_storage<typename Kernel::SharedStorage>();
  const auto block = tile::key_block(blockIdx.x, tile::ceil_div(args.seq_kv, config.block_kv), args.heads_kv);
  const tile::Sequence sequence = tile::make_sequence<config.features>(args, block.batch_idx);
  const int kv_begin = block.tile_idx * config.block_kv;
  if (kv_begin >= sequence.rows_kv) return;

  Kernel kernel(args, storage, sequence, block.head_idx, kv_begin);
  if (kernel.num_steps() > 0) kernel.differentiate_tiles();
  kernel.finish();
}

}  // namespace flash_attention
