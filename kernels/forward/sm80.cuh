#pragma once

#include "forward/sm80_keys.cuh"
#include "forward/sm80_shape.cuh"
#include "ptx/path.cuh"
#include "ptx/registers.cuh"
#include "ptx/shared.cuh"
#include "tile/mma.cuh"
#include "tile/softmax.cuh"
#include "tile/tail.cuh"

// Attention forward with mma.sync and cp.async: sm_80 and up, 16-bit types, the whole contract.
//
// A thread block takes one work tile: block_q queries of one head, 16 or 32 rows per warp. It loops over the KV blocks from
// the last to the first. K and V have one buffer each: V lands while Q K^T is computed, the next K while P V is.
//
//   Q -> shared (-> registers where they fit);  prefetch K of the last block
//   for each KV block:
//     wait for K;  prefetch V;       S = Q K^T             registers    multiply_keys
//     wait for V;  prefetch next K;  P = softmax step      registers    sm80_scores.cuh, tile/softmax.cuh
//                                    O = O * rescale + P V  registers    add_values
//   O / sum -> shared -> global, 16 bytes per lane;  lse                finish: sm80_epilogue.cuh

namespace flash_attention {

template <ForwardConfig config>
struct ForwardSm80 : ForwardSm80Shape<config> {
  using Shape = ForwardSm80Shape<config>;
  using Shape::features, Shape::type, Shape::block_q, Shape::block_kv, Shape::threads, Shape::dim_v, Shape::rows_per_warp,
      Shape::m_tiles, Shape::split, Shape::q_steps, Shape::Q_in_registers, Shape::sums_in_shared, Shape::repairs_rows,
      Shape::log2_P_scale, Shape::block_of;
  using typename Shape::Element, typename Shape::QTile, typename Shape::OTile, typename Shape::KTile, typename Shape::VTile,
      typename Shape::SharedStorage;
  using Scores = float[m_tiles][block_kv / 8][4];

  const AttentionArgs& args;
  SharedStorage& storage;
  const tile::Sequence sequence;
  const int head_idx, q_begin;
  const int thread = threadIdx.x, lane = threadIdx.x % 32, warp_row = static_cast<int>(threadIdx.x) / 32 * rows_per_warp;
  const tile::LanePlace place{lane};
  const tile::Score<features> score;
  const unsigned Q_smem = ptx::shared_address(&storage.Q), K_smem = ptx::shared_address(&storage.K),
                 V_smem = ptx::shared_address(&storage.V);

  unsigned Q[Q_in_registers ? m_tiles : 1][Q_in_registers ? q_steps : 1][4];
  float O[m_tiles][dim_v / 8][4]{};
  tile::RowState rows[m_tiles];

  __device__ __forceinline__ ForwardSm80(const AttentionArgs& arguments, SharedStorage& shared, const tile::Sequence& s,
                                         int head, int first_query)
      : args(arguments), storage(shared), sequence(s), head_idx(head), q_begin(first_query), score(arguments, s, head) {}

  __device__ __forceinline__ tile::Rows<const Element> keys(const TensorView& view) const {
    auto result = tile::key_rows<const Element, features>(view, sequence, head_idx / args.group);
    result.count = sequence.visible_kv;
    return result;
  }

  __device__ __forceinline__ void load_Q() {
    const auto from = tile::query_rows<const Element, features>(args.Q, sequence, head_idx).from(q_begin);
    tile::copy_tile_async<threads, config.head_dim, QTile>(Q_smem, from, thread);
    ptx::copy_async_commit();
  }
  /// The tile that comes after tile_idx + 1: the one before it of which the masks show something, or tiles.begin - 1.
  __device__ __forceinline__ int tile_below(int tile_idx, const tile::TileRange& tiles,
                                            tile::VisibleTiles& visible_tiles) const {
    if constexpr (!tile::Score<features>::skips_tiles) return tile_idx;
    return visible_tiles.previous(tile_idx, tiles.begin, [&](int other) {
      return other >= tiles.begin && other < tiles.end &&
             !score.template masks_hide<block_q, block_kv>(q_begin, other * block_kv);
    });
  }

  __device__ __forceinline__ void read_Q(unsigned (&A)[4], int m, int step) const {
    ptx::ldmatrix_x4(A, QTile::step(tile::a_address<QTile>(Q_smem, warp_row, lane), 2 * step) + m * 16 * 128);
  }
  __device__ __forceinline__ void keep_Q() {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
      for (int step = 0; step < q_steps; ++step) read_Q(Q[m][step], m, step);
    }
  }

  /// S = Q K^T.
  __device__ __forceinline__ void multiply_keys(Scores& S) {
    const unsigned K_address = tile::b_transposed_address<KTile>(K_smem, 0, ptx::registers_fresh(lane));
    tile::multiply<type, q_steps>(
        S,
        [&](unsigned(&A)[4], int m, int step) {
          if constexpr (Q_in_registers) {
#pragma unroll
            for (int e = 0; e < 4; ++e) A[e] = Q[m][step][e];
          } else {
            read_Q(A, m, step);
          }
        },
        [&](unsigned(&B)[4], int n, int step) { ptx::ldmatrix_x4(B, KTile::step(K_address, 2 * step) + n * 16 * 128); });
  }

  /// Scores from dot products, -inf where hidden; P = 0 where dropped (sm80_scores.cuh).
  template <bool some_hidden>
  __device__ __forceinline__ void score_tile(Scores& S, int kv_begin) const;
  __device__ __forceinline__ void drop_tile(Scores& P, int kv_begin) const;

  __device__ __forceinline__ void rescale_output(const float (&rescale)[m_tiles][2]) {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
      for (int n = 0; n < dim_v / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) O[m][n][e] *= rescale[m][e / 2];
      }
    }
  }
  /// O += P V.
  __device__ __forceinline__ void add_values(const Scores& P) {
    const unsigned V_address = tile::b_address<VTile>(V_smem, 0, ptx::registers_fresh(lane));
    tile::multiply<type, block_kv / 16>(
        O, [&](unsigned(&A)[4], int m, int step) { tile::pack_a<type>(A, P[m][2 * step], P[m][2 * step + 1]); },
        [&](unsigned(&B)[4], int n, int step) {
          ptx::ldmatrix_x4_trans(B, VTile::step(V_address, 2 * n) + step * 16 * 128);
        });
  }

  /// The same two products of floats (tf32.cuh).
  __device__ __forceinline__ void multiply_split_keys(Scores& S) const;
  __device__ __forceinline__ void add_split_values(const Scores& P);

  __device__ __forceinline__ void read_sums(int m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) rows[m].sum[half] = storage.sums[2 * m + half][thread];
  }
  __device__ __forceinline__ void write_sums(int m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) storage.sums[2 * m + half][thread] = rows[m].sum[half];
  }

  __device__ __forceinline__ void attend(const tile::TileRange& tiles) {
    tile::VisibleTiles visible_tiles;
    int tile_idx = tile_below(tiles.end - 1, tiles, visible_tiles);
    if (tile_idx < tiles.begin) return;  // the masks hide all of it
    sm80::KeyCopies<ForwardSm80, features.paged> copies(*this, tile_idx * block_kv);
    load_Q();
    copies.template load_K<true>();
    if constexpr (Q_in_registers) {
      ptx::copy_async_wait<1>();
      __syncthreads();  // Q has landed, from every thread's copies
      keep_Q();
    }
    if constexpr (sums_in_shared) {
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) write_sums(m);
    }
    const float scale_log2 = score.unit_scale() * tile::log2_e;
#pragma unroll 1
    while (tile_idx >= tiles.begin) {
      const int kv_begin = tile_idx * block_kv, next_idx = tile_below(tile_idx - 1, tiles, visible_tiles);
      const int distance = (next_idx - tile_idx) * block_kv;
      ptx::copy_async_wait<0>();
      __syncthreads();  // K has landed, and every warp is done with the previous V
      copies.load_V(distance, next_idx * block_kv);
      Scores S{};
      if constexpr (split) {
        multiply_split_keys(S);
      } else {
        multiply_keys(S);
      }
      ptx::copy_async_wait<0>();
      __syncthreads();  // V has landed, and every warp is done with K
      copies.move_K(distance);
      if (next_idx >= tiles.begin) copies.template load_K<false>();
      if (!score.template all_visible<block_q, block_kv>(q_begin, kv_begin)) {
        ptx::path<split ? "forward/tf32 edge tile" : "forward/sm80 edge tile">();
        score_tile<true>(S, kv_begin);
      } else if constexpr (!tile::Score<features>::linear) {
        ptx::path<split ? "forward/tf32 inner tile with options" : "forward/sm80 inner tile with options">();
        score_tile<false>(S, kv_begin);
      }
      float rescale[m_tiles][2];
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) {
        if constexpr (sums_in_shared) read_sums(m);
        rows[m].template update<log2_P_scale, features.bias || features.score_program || split>(S[m], scale_log2,
                                                                                                rescale[m]);
        if constexpr (sums_in_shared) write_sums(m);
      }
      if constexpr (features.dropout) drop_tile(S, kv_begin);
      rescale_output(rescale);
      if constexpr (split) {
        add_split_values(S);
      } else {
        add_values(S);
      }
      tile_idx = next_idx;
    }
    if constexpr (sums_in_shared) {
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) read_sums(m);
    }
  }

  /// Writes lse, and O through the warp's own rows of shared memory (sm80_epilogue.cuh).
  __device__ __forceinline__ void finish();
};

}  // namespace flash_attention

#include "forward/sm80_epilogue.cuh"
#include "forward/sm80_scores.cuh"

namespace flash_attention {

template <ForwardConfig config>
__device__ __forceinline__ void forward_sm80(const AttentionArgs& args) {
  using Kernel = ForwardSm80<config>;
  auto& storage = ptx::shared_storage<typename Kernel::SharedStorage>();
  tile::clear_output_tail<config>(args, threadIdx.x, Kernel::threads);
  const auto block = Kernel::block_of(args, blockIdx.x);
  const tile::Sequence sequence = tile::make_sequence<config.features>(args, block.batch_idx);
  const int q_begin = block.tile_idx * config.block_q;
  if (q_begin >= sequence.rows_q) return;

  Kernel kernel(args, storage, sequence, block.head_idx, q_begin);
  const auto tiles = kernel.score.template key_tiles<config.block_q, config.block_kv>(q_begin);
  if (tiles.begin < tiles.end) kernel.attend(tiles);
  kernel.finish();
}

}  // namespace flash_attention
