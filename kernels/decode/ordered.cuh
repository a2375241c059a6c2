#pragma once

#include "abi/config.h"
#include "abi/decode.h"
#include "ptx/memory.cuh"
#include "ptx/shared.cuh"
#include "ptx/warp.cuh"
#include "tile/fixed_order.cuh"
#include "tile/mma.cuh"
#include "tile/softmax.cuh"

// A tile of keys in the fixed order of invariant bits: docs/numerics.md. References and sums are those of all keys of the
// tile, as in forward/sm90. No sum is split between warps:
//
//   each warp, for its keys:     scores
//   if a row has no reference:   maxima -> shared memory;  barrier;  the maximum of all           share_maxima
//   each warp, for its keys:     P, and sums of 16 keys -> shared memory                          exponentiate, share_...
//   barrier
//   if a sum may be too large:   the first warp decides which rows raise their reference;  barrier
//                                each warp, for its keys: P and sums again;  barrier              raise
//   the first warp:              the row sums                                                     add_sums
//   each warp, for its columns:  O = O * rescale + P V                                            Consumer::add_columns
//
// P and the sums have two places, for tiles by turns: a warp may write those of a tile while another still reads those of
// the tile before.

namespace flash_attention::decode {

using namespace abi;

/// The data that warps exchange.
template <bool present, int keys, int warps>
struct OrderStorage {
  struct Tile {
    alignas(16) unsigned P[keys / 16][32][4];  // as the A operand of each 16 keys, by lane
    alignas(8) float sums[keys / 16][32][2];   // of 16 keys, by lane: rows lane / 4 and that + 8
  };
  Tile tiles[2];                              // by turns
  alignas(16) float maxima[16][warps];        // by row
  float references[16];                       // by row, of the first warp
  int suspect[2];                             // 1 + the position of the last tile whose sums may be too large
};
template <int keys, int warps>
struct OrderStorage<false, keys, warps> {};

template <ForwardConfig config>
struct Order {
  static constexpr DecodeLayout layout{config};
  static constexpr int warps = config.num_warps, warp_keys = config.block_kv / layout.tile_warps, groups = warp_keys / 16;
  static constexpr int all_groups = config.block_kv / 16;
  static constexpr Type type = config.features.dtype;
  using Storage = OrderStorage<has_fixed_order(config), config.block_kv, warps>;
  using Scores = float[warp_keys / 8][4];
  using Pair = ptx::Vector<float, 2>;
  using Four = ptx::Vector<unsigned, 4>;

  /// A warp's columns of O. They are whole units, because V is loaded in units.
  static constexpr int unit = is_narrow(key_type(config.features)) ? 32 : 16;
  static constexpr int own_columns = tile::ceil_div(DecodeLayout::columns_of(config, config.head_dim_v), unit * warps) * unit;
  __device__ __forceinline__ static constexpr int first_column(int warp) { return warp * own_columns; }

  Storage& storage;
  const int lane, warp;
  const int position;  // of the tile, in the run

  __device__ __forceinline__ auto& tile() const { return storage.tiles[position % 2]; }

  __device__ __forceinline__ void share_maxima(const Scores& S) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float most = S[0][2 * half];
#pragma unroll
      for (int n = 0; n < warp_keys / 8; ++n) most = ptx::max(most, ptx::max(S[n][2 * half], S[n][2 * half + 1]));
      most = ptx::max(most, ptx::shuffle_xor(most, 1));
      most = ptx::max(most, ptx::shuffle_xor(most, 2));
      if (lane % 4 == 0) ptx::store_shared(ptx::shared_address(&storage.maxima[lane / 4 + 8 * half][warp]), most);
    }
  }

  /// The maxima of the lane's rows over all keys of the tile.
  __device__ __forceinline__ float maximum_of(int half) const {
    const unsigned from = ptx::shared_address(storage.maxima[lane / 4 + 8 * half]);
    float most = -tile::infinity;
#pragma unroll
    for (int first = 0; first < warps; first += 2) {
      const auto two = ptx::load_shared<Pair>(from + 4 * first);
      most = ptx::max(most, ptx::max(two[0], two[1]));
    }
    return most;
  }

  /// Gives rows that have no reference the maximum of all keys of the tile.
  __device__ __forceinline__ void take_references(float (&reference)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      reference[half] = reference[half] == -tile::infinity ? maximum_of(half) : reference[half];
  }

  /// Turns the scores of the warp's keys into probabilities. Returns whether the sum of a row may be too large; `sum`: of
  /// the tiles before, of the first warp.
  __device__ __forceinline__ bool exponentiate(Scores& S, const float (&reference)[2], float scale_log2,
                                               const float (&sum)[2]) const {
    bool suspect = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const tile::ExponentOrigin from(reference[half], scale_log2);
      float largest = 0;
#pragma unroll
      for (int n = 0; n < warp_keys / 8; ++n) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          S[n][e] = ptx::exp2(ptx::fma(S[n][e] - from.origin, scale_log2, -from.shift));
          largest = ptx::max(largest, S[n][e]);
        }
      }
      suspect = suspect || tile::may_exceed<type>(largest, sum[half]);
    }
#pragma unroll
    for (int g = 0; g < groups; ++g) {
      float sums[2];
#pragma unroll
      for (int half = 0; half < 2; ++half)
        sums[half] = tile::sum_of_four(S[2 * g][2 * half], S[2 * g][2 * half + 1], S[2 * g + 1][2 * half],
                                       S[2 * g + 1][2 * half + 1]);
      ptx::store_shared(ptx::shared_address(tile().sums[warp * groups + g][lane]), Pair{{sums[0], sums[1]}});
    }
    return ptx::any(suspect);
  }

  __device__ __forceinline__ void report() const {
    if (lane == 0) ptx::store_shared(ptx::shared_address(&storage.suspect[position % 2]), position + 1);
  }
  __device__ __forceinline__ bool is_suspect() const {
    return ptx::load_shared<int>(ptx::shared_address(&storage.suspect[position % 2])) == position + 1;
  }

  /// The first warp, with all maxima of the tile: a row whose sum would be too large raises its reference.
  __device__ __forceinline__ void decide(const float (&reference)[2], const float (&sum)[2]) const {
    float all[2] = {sum[0], sum[1]};
    add_sums(all, {1, 1});
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float of_row = tile::reduce_quad(all[half], [](float a, float b) { return a + b; });
      float raised = reference[half];
      if (!(of_row <= tile::largest_sum<type>)) raised = ptx::max(raised, maximum_of(half));
      if (lane % 4 == 0) ptx::store_shared(ptx::shared_address(&storage.references[lane / 4 + 8 * half]), raised);
    }
  }
  /// What the first warp has decided. The sums before are multiplied by `rescale`.
  __device__ __forceinline__ void raise(float (&reference)[2], float scale_log2, float (&rescale)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto raised = ptx::load_shared<float>(ptx::shared_address(&storage.references[lane / 4 + 8 * half]));
      rescale[half] = tile::factor_of_raise(reference[half], raised, scale_log2);
      reference[half] = raised;
    }
  }

  __device__ __forceinline__ void share_probabilities(const Scores& P) const {
#pragma unroll
    for (int g = 0; g < groups; ++g) {
      unsigned A[4];
      tile::pack_a<type>(A, P[2 * g], P[2 * g + 1]);
      ptx::store_shared(ptx::shared_address(tile().P[warp * groups + g][lane]), Four{{A[0], A[1], A[2], A[3]}});
    }
  }
  /// P of 16 keys of the tile.
  __device__ __forceinline__ void take_probabilities(unsigned (&A)[4], int step) const {
    const auto four = ptx::load_shared<Four>(ptx::shared_address(tile().P[step][lane]));
#pragma unroll
    for (int e = 0; e < 4; ++e) A[e] = four[e];
  }

  /// Adds up the sums of the tile, 16 keys at a time, then the row sums. Called by one warp.
  __device__ __forceinline__ void add_sums(float (&sum)[2], const float (&rescale)[2]) const {
    float total[2] = {};
#pragma unroll
    for (int g = 0; g < all_groups; ++g) {
      const auto four = ptx::load_shared<Pair>(ptx::shared_address(tile().sums[g][lane]));
#pragma unroll
      for (int half = 0; half < 2; ++half) total[half] = g == 0 ? four[half] : total[half] + four[half];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) sum[half] = ptx::fma(sum[half], rescale[half], total[half]);
  }
};

}  // namespace flash_attention::decode
