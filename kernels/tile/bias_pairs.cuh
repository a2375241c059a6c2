#pragma once

#include "ptx/matrix.cuh"
#include "ptx/memory.cuh"
#include "tile/score.cuh"

// The biases of a tile of scores, in the registers of a warp, in the type that they have in memory. They are loaded
// while the scores are computed: a load at the place where they are added would have to be waited for.

namespace flash_attention::tile {

/// The biases of one thread: score i has row (i / 2) % 2 of two rows that are 8 apart, and column 8 (i / 4) + i % 2
/// (ptx/wgmma.cuh). Rows are queries. With `transposed` rows are keys: then 8 x 8 scores are loaded with queries as
/// rows, and transposed.
template <Features features, int count, bool transposed = false>
struct BiasPairs {
  using Bias = typename Score<features>::Bias;
  using Pair = ptx::Vector<Bias, 2>;
  static constexpr bool present = features.bias && count > 0;
  static_assert(!present || !transposed || sizeof(Bias) == 2, "the instruction transposes 16 bits");
  static constexpr int num_pairs = present ? count / 2 : 1;

  Pair pairs[num_pairs];

  __device__ __forceinline__ static constexpr int query_of(int pair) { return 8 * (transposed ? pair / 2 : pair % 2); }
  __device__ __forceinline__ static constexpr int key_of(int pair) { return 8 * (transposed ? pair % 2 : pair / 2); }

  /// Loads the biases from query `first_query` (lane / 4 of the tile) and key `first_key` (2 (lane % 4)) on; the tile's
  /// keys end at `key_end`. Queries past the last one repeat its biases. Keys that no query sees have no bias.
  __device__ __forceinline__ void load(const Score<features>& score, int first_query, int first_key, int key_end) {
    if constexpr (present) {
      const auto place = [&](int pair) {
        return score.bias + min(first_query + query_of(pair), score.sight.len_q - 1) * score.bias_stride + first_key +
               key_of(pair);
      };
      const auto odd = reinterpret_cast<unsigned long long>(score.bias) | score.bias_stride * sizeof(Bias);
      if (key_end <= score.sight.visible_kv && odd % sizeof(Pair) == 0) {
#pragma unroll
        for (int p = 0; p < num_pairs; ++p) pairs[p] = ptx::load_readonly(reinterpret_cast<const Pair*>(place(p)));
      } else {
#pragma unroll
        for (int p = 0; p < num_pairs; ++p) {
#pragma unroll
          for (int e = 0; e < 2; ++e)
            pairs[p][e] = first_key + key_of(p) + e < score.sight.visible_kv ? place(p)[e] : Bias{};
        }
      }
    }
  }

  /// Prefetches the biases of the rows [q, q + rows) and the keys [kv_begin, kv_begin + keys) to L2. Thread `index` of
  /// at least `rows` threads takes one row. Rows and keys that do not exist are left out.
  template <int rows, int keys>
  __device__ __forceinline__ static void prefetch(const Score<features>& score, int q, int kv_begin, int index) {
    constexpr int line = 128 / static_cast<int>(sizeof(Bias));
    if (!features.bias || index >= rows || q + index >= score.sight.len_q) return;
#pragma unroll
    for (int key = kv_begin; key < kv_begin + keys; key += line) {
      if (key < score.sight.visible_kv) ptx::prefetch_L2(score.bias + (q + index) * score.bias_stride + key);
    }
  }

  /// Called once, before the biases are used: moves them to the threads that have their scores.
  __device__ __forceinline__ void transpose() {
    if constexpr (present && transposed) {
#pragma unroll
      for (Pair& pair : pairs) pair = __builtin_bit_cast(Pair, ptx::transpose_8x8(__builtin_bit_cast(unsigned, pair)));
    }
  }

  /// Whether some biases may be too large (tile/score.cuh). In bfloat16 few are: a test of a pair takes three
  /// instructions, a bound ten.
  __device__ __forceinline__ bool some_large() const {
    if constexpr (present && features.bias_dtype == Type::bfloat16) {
      constexpr unsigned first_large = 0x7f2e;  // the bits of the first bfloat16 above largest_score
      static_assert(__builtin_bit_cast(float, first_large << 16) > largest_score &&
                    __builtin_bit_cast(float, (first_large - 1) << 16) <= largest_score);
      unsigned large = 0;
#pragma unroll
      for (const Pair& pair : pairs)
        large |= (__builtin_bit_cast(unsigned, pair) & 0x7fff7fffu) + (0x8000u - first_large) * 0x10001u;
      return (large & 0x80008000u) != 0;
    } else {
      return present && features.bias_dtype == Type::float32;
    }
  }

  /// The bias of score i, 0 without a bias. It is bounded only if some biases are large.
  template <bool large = true>
  __device__ __forceinline__ float at(int i) const {
    if constexpr (!present) {
      return 0;
    } else {
      return large ? bounded_bias<features.bias_dtype>(pairs[i / 2][i % 2]) : ptx::to_float(pairs[i / 2][i % 2]);
    }
  }
};

}  // namespace flash_attention::tile
