#pragma once

#include "ptx/path.cuh"
#include "ptx/shared.cuh"
#include "tile/dropout.cuh"
#include "tile/product.cuh"
#include "tile/score.cuh"
#include "tile/workspace.cuh"

// Attention backward on CUDA cores: every option, every dtype, every head_dim, any GPU, the same bits in every run.
//
// There are two kernels. Each owns what it writes, so no sum needs an atomic; both compute the scores:
//
//   dK, dV: a block takes 64 keys of one key head           dQ: a block takes 64 queries of one head
//     for each query head of the group, each query tile:      for each key tile:
//       P, dS = from Q, K, V, dO, lse, delta                    dS = from Q, K, V, dO, lse, delta
//       dV += P^T dO                                            dQ += dS K
//       dK += dS^T Q
//
// delta comes from backward/delta.cuh.

namespace flash_attention {

using namespace abi;

template <BackwardConfig config>
struct BackwardPortable {
  static constexpr Features features = config.features;
  static constexpr int dim = config.head_dim, dim_v = config.head_dim_v;
  static constexpr int block = tile::block_rows;
  using Element = ptx::Element<features.dtype>;
  static_assert(config.block_q == block && config.block_kv == block && config.num_warps == 8);

  struct SharedStorage {
    tile::ProductStorage<tile::max(dim, dim_v)> product;
    tile::WeightTile weights;
  };

  /// One sequence and query head: where its rows are and how its scores are computed.
  struct Head {
    tile::Rows<const Element> Q, K, V, dO;
    tile::Score<features> score;
    tile::Dropout dropout;
    const float* lse;
    const float* delta;
    const float* dentropy;   // if a gradient flows through the entropy
    const float* dkey_mass;  // if a gradient flows through key masses

    __device__ __forceinline__ Head(const AttentionArgs& args, const tile::Sequence& sequence, int head_idx)
        : Q(tile::query_rows<const Element, features>(args.Q, sequence, head_idx)),
          K(tile::key_rows<const Element, features>(args.K, sequence, head_idx / args.group)),
          V(tile::key_rows<const Element, features>(args.V, sequence, head_idx / args.group)),
          dO(tile::query_rows<const Element, features>(args.dO, sequence, head_idx)),
          score(args, sequence, head_idx),
          dropout(args, sequence.batch_idx, head_idx) {
      const long long statistics = tile::statistics_offset<features>(args, sequence, head_idx);
      lse = args.lse + statistics;
      delta = tile::workspace<const float>(args, BackwardRegion::delta) + statistics;
      if constexpr (features.entropy) dentropy = args.dentropy + statistics;
      if constexpr (features.key_mass)
        dkey_mass = args.dkey_mass + tile::key_mass_offset<features>(args, sequence, head_idx);
      Q.count = dO.count = sequence.len_q;
      K.count = V.count = sequence.visible_kv;
    }

    /// Whether masks hide the whole tile.
    __device__ __forceinline__ bool skips(int q_begin, int kv_begin) const {
      return score.sight.template masks_hide<block, block>(q_begin, kv_begin);
    }
    __device__ __forceinline__ bool some_hidden(int q_begin, int kv_begin) const {
      return q_begin + block > score.sight.len_q || !score.sight.template all_visible<block, block>(q_begin, kv_begin);
    }
  };

  /// For kernels that share code with second derivatives (second/portable.cuh).
  __device__ __forceinline__ static const Head& first_of(const Head& head) { return head; }

  /// The gradients of a score tile.
  struct Gradients {
    float P[4][4];   // after dropout and its scaling
    float dS[4][4];  // of the score before bias and ALiBi, or after them

    /// Where dS is taken: at the dot product (without the scale), at the score with its bias, or at the program's
    /// result. In the last case P is the score before the program.
    enum class At { dot, score, program };

    template <At at = At::dot>
    __device__ __forceinline__ void compute(const Head& head, int q_begin, int kv_begin, bool some_hidden,
                                            SharedStorage& storage) {
      float S[4][4]{}, dP[4][4]{};
      tile::add_dot_products<dim>(S, head.Q.from(q_begin), head.K.from(kv_begin), storage.product);
      tile::add_dot_products<dim_v>(dP, head.dO.from(q_begin), head.V.from(kv_begin), storage.product);
      const tile::ThreadPlace place;
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int i = q_begin + place.row + r;
        const float lse = i < head.score.sight.len_q ? head.lse[i] : -tile::infinity;
        const float delta = i < head.score.sight.len_q ? head.delta[i] : 0;
        const float dentropy = features.entropy && i < head.score.sight.len_q ? head.dentropy[i] : 0;
#pragma unroll
        for (int c = 0; c < 4; c += 2) {
          const int j = kv_begin + place.column + c;
          float factor[2] = {1, 1};
          if constexpr (features.dropout) head.dropout.pair(i, j, factor[0], factor[1]);
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if (some_hidden && !head.score.sight.visible(i, j + e)) {
              P[r][c + e] = dS[r][c + e] = tile::hidden();
              continue;
            }
            float slope = 1, of_cap;
            const float capped = head.score.capped(S[r][c + e], of_cap);
            const float score = head.score.programmed(capped + head.score.added(i, j + e), i, j + e, slope);
            if (features.score_program && score == -tile::infinity) {
              P[r][c + e] = dS[r][c + e] = tile::hidden();
              continue;
            }
            // If lse is -inf, every visible score is -inf, too: the row has no probabilities.
            const float p = lse < tile::lowest_lse ? 0 : tile::exp(score - lse);
            // A dropped score does not count, even if it is NaN.
            const bool dropped = features.dropout && factor[e] == 0;
            P[r][c + e] = dropped ? tile::hidden() : p * factor[e];
            float dp = dropped ? 0 : dP[r][c + e] * factor[e];
            if constexpr (features.key_mass) dp += head.dkey_mass[j + e];
            if constexpr (features.entropy) {
              if (p != 0) dp -= dentropy * (score - lse + 1);
            }
            dS[r][c + e] = p * (dp - delta);
            if constexpr (features.score_program && at != At::program) dS[r][c + e] *= slope;
            if constexpr (at == At::dot) dS[r][c + e] *= of_cap;
            if constexpr (at == At::program) P[r][c + e] = capped + head.score.added(i, j + e);
          }
        }
      }
    }
  };
};

template <BackwardConfig config>
__device__ __forceinline__ void backward_portable_dkv(const AttentionArgs& args) {
  using Kernel = BackwardPortable<config>;
  using Element = typename Kernel::Element;
  constexpr Features features = config.features;
  constexpr int block_rows = tile::block_rows;
  auto& storage = ptx::shared_storage<typename Kernel::SharedStorage>();

  const auto block = tile::key_block(blockIdx.x, tile::ceil_div(args.seq_kv, block_rows), args.heads_kv);
  const tile::Sequence sequence = tile::make_sequence<features>(args, block.batch_idx);
  const int kv_begin = block.tile_idx * block_rows;
  if (kv_begin >= sequence.rows_kv) return;

  float dK[4][tile::columns_per_thread(config.head_dim)]{}, dV[4][tile::columns_per_thread(config.head_dim_v)]{};
#pragma unroll 1
  for (int head_idx = block.head_idx * args.group; head_idx < (block.head_idx + 1) * args.group; ++head_idx) {
    const typename Kernel::Head head(args, sequence, head_idx);
    const auto tiles = head.score.sight.template query_tiles<block_rows, block_rows>(kv_begin);
#pragma unroll 1
    for (int tile_idx = tiles.begin; tile_idx < tiles.end; ++tile_idx) {
      const int q_begin = tile_idx * block_rows;
      if (head.skips(q_begin, kv_begin)) continue;
      const bool some_hidden = head.some_hidden(q_begin, kv_begin);
      if (some_hidden) ptx::path<"backward/portable edge tile">();
      if (!some_hidden) ptx::path<"backward/portable inner tile">();
      typename Kernel::Gradients gradients;
      gradients.compute(head, q_begin, kv_begin, some_hidden, storage);
      tile::store_weights_by_row(storage.weights, gradients.P);
      tile::add_weighted_rows<config.head_dim_v>(dV, storage.weights, head.dO.from(q_begin), storage.product,
                                                 some_hidden || features.dropout || features.score_program);
      __syncthreads();  // all threads have read P, which dS overwrites
      tile::store_weights_by_row(storage.weights, gradients.dS);
      tile::add_weighted_rows<config.head_dim>(dK, storage.weights, head.Q.from(q_begin), storage.product,
                                               some_hidden || features.score_program);
    }
  }
  const float scale[4] = {args.scale, args.scale, args.scale, args.scale}, one[4] = {1, 1, 1, 1};
  tile::store_rows<config.head_dim>(tile::key_rows<Element, features>(args.dK, sequence, block.head_idx).from(kv_begin), dK,
                                    scale);
  tile::store_rows<config.head_dim_v>(tile::key_rows<Element, features>(args.dV, sequence, block.head_idx).from(kv_begin),
                                      dV, one);
}

template <BackwardConfig config>
__device__ __forceinline__ void backward_portable_dq(const AttentionArgs& args) {
  using Kernel = BackwardPortable<config>;
  using Element = typename Kernel::Element;
  constexpr Features features = config.features;
  constexpr int block_rows = tile::block_rows;
  auto& storage = ptx::shared_storage<typename Kernel::SharedStorage>();

  const auto block = tile::query_block(blockIdx.x, tile::ceil_div(args.seq_q, block_rows), args.heads_q);
  const tile::Sequence sequence = tile::make_sequence<features>(args, block.batch_idx);
  const int q_begin = block.tile_idx * block_rows;
  if (q_begin >= sequence.rows_q) return;

  const typename Kernel::Head head(args, sequence, block.head_idx);
  float dQ[4][tile::columns_per_thread(config.head_dim)]{};
  const auto tiles = head.score.sight.template key_tiles<block_rows, block_rows>(q_begin);
#pragma unroll 1
  for (int tile_idx = tiles.begin; tile_idx < tiles.end; ++tile_idx) {
    const int kv_begin = tile_idx * block_rows;
    if (head.skips(q_begin, kv_begin)) continue;
    const bool some_hidden = head.some_hidden(q_begin, kv_begin);
    typename Kernel::Gradients gradients;
    gradients.compute(head, q_begin, kv_begin, some_hidden, storage);
    tile::store_weights_by_column(storage.weights, gradients.dS);
    tile::add_weighted_rows<config.head_dim>(dQ, storage.weights, head.K.from(kv_begin), storage.product,
                                             some_hidden || features.score_program);
  }
  const float scale[4] = {args.scale, args.scale, args.scale, args.scale};
  tile::store_rows<config.head_dim>(tile::query_rows<Element, features>(args.dQ, sequence, block.head_idx).from(q_begin),
                                    dQ, scale);
}

}  // namespace flash_attention
