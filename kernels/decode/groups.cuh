#pragma once

#include "abi/decode.h"
#include "decode/tiles.cuh"
#include "ptx/memory.cuh"
#include "tile/group_pairs.cuh"
#include "tile/mma.cuh"
#include "tile/scales.cuh"

// K and V in 4 bits: the scales of a tile's groups on their way to shared memory, and the two products.
//
// ldmatrix moves 16 bits, four columns, so the columns arrive in another order, as those of 8 bits do (consumer.cuh).
// Reading K, lane t of four gets the columns 8t to 8t + 7 of 32. Of them the products take 8t + n and 8t + 4 + n, n = 0 to
// 3, as columns 2t and 2t + 1 (n even) or 2t + 8 and 2t + 9 (odd) of step n / 2; so Q is stored in that order (store_Q).
// Transposing V, a lane gets columns 4g to 4g + 3 of keys 2t and 2t + 1, and block n of four holds the columns 4g + n, g =
// 0 to 7. So lane t has eight neighbouring columns of O, 8t to 8t + 7, one of each half in a block; Finish stores them
// accordingly.

namespace flash_attention::decode {

using namespace abi;

/// Scales of the rows that a warp loads. A lane has a row of K or of V in registers, from the loads of its tile to those of
/// the next one: then they go to shared memory as pairs of 16 bits. So nothing waits for them.
template <ForwardConfig config, int own_rows>
struct GroupLoader {};
template <ForwardConfig config, int own_rows>
requires(has_groups(config.features.kv_dtype)) struct GroupLoader<config, own_rows> {
  static constexpr Features features = config.features;
  static constexpr Type code = features.kv_dtype, type = features.dtype;
  static constexpr DecodeGroups groups{config};
  static constexpr int parts = own_rows > 16 ? 2 : 1;  // K and V side by side in a warp's lanes, or one after the other
  using Scale = tile::GroupScale<features>;
  static constexpr int most = tile::max(groups.of_k, groups.of_v) * static_cast<int>(sizeof(Scale));
  static constexpr int words = tile::ceil_div(most, 4);

  unsigned scales[parts][words];
  unsigned zeros[parts][groups.numbers > 1 ? words : 1];
  unsigned to = 0;  // shared memory of the tile whose scales these are; 0: none

  /// A row of `bytes`, as wide as its alignment.
  template <int bytes>
  __device__ __forceinline__ static void load_row(unsigned (&row)[words], const void* from, bool exists) {
    if constexpr (bytes % 4 == 0) {
      constexpr int all = bytes / 4, width = all % 4 == 0 ? 4 : all % 2 == 0 ? 2 : 1;
#pragma unroll
      for (int first = 0; first < all; first += width) {
        ptx::Vector<unsigned, width> loaded{};
        if (exists)
          loaded = ptx::load_readonly(
              reinterpret_cast<const ptx::Vector<unsigned, width>*>(static_cast<const unsigned*>(from) + first));
#pragma unroll
        for (int i = 0; i < width; ++i) row[first + i] = loaded[i];
      }
    } else {
      const auto* pieces = static_cast<const unsigned short*>(from);
#pragma unroll
      for (int i = 0; i < bytes / 2; ++i) {
        const unsigned piece = exists ? pieces[i] : 0u;
        row[i / 2] = i % 2 == 0 ? piece : row[i / 2] | piece << 16;
      }
    }
  }

  template <bool of_keys>
  __device__ __forceinline__ void load(int part, const AttentionArgs& args, long long page, long long row, int head_idx,
                                       bool exists) {
    const GroupView& view = of_keys ? args.K_groups : args.V_groups;
    const long long offset = page * view.batch_stride + row * view.seq_stride + head_idx * view.head_stride;
    constexpr int bytes = (of_keys ? groups.of_k : groups.of_v) * static_cast<int>(sizeof(Scale));
    load_row<bytes>(scales[part], static_cast<const Scale*>(view.scales) + offset, exists);
    if constexpr (groups.numbers > 1) load_row<bytes>(zeros[part], static_cast<const Scale*>(view.zeros) + offset, exists);
  }

  /// Starts the loads of a tile's rows. own_row: of the lane, among those of its warp.
  __device__ __forceinline__ void load_rows(const AttentionArgs& args, long long page, long long row, int head_idx,
                                            bool exists, int lane, unsigned stage) {
    to = stage;
    if constexpr (parts == 2) {
      load<true>(0, args, page, row, head_idx, exists);
      load<false>(1, args, page, row, head_idx, exists);
    } else if (lane < own_rows) {
      load<true>(0, args, page, row, head_idx, exists);
    } else if (lane < 2 * own_rows) {
      load<false>(0, args, page, row, head_idx, exists);
    }
  }

  __device__ __forceinline__ void store_keys(int part, int key) const {
    const unsigned row = to + static_cast<unsigned>(key * groups.key_words * 4);
#pragma unroll
    for (int g = 0; g < groups.of_k; ++g) {
      const unsigned twice = g % 2 == 0 ? 0x1010u : 0x3232u;
      const unsigned pair = tile::scale_pair<code, type>(scales[part], g / 2);
      ptx::store_shared(row + static_cast<unsigned>(g * groups.numbers * 4), ptx::permute_bytes(pair, pair, twice));
      if constexpr (groups.numbers > 1) {
        const unsigned zero = zeros[part][g / 2];
        ptx::store_shared(row + static_cast<unsigned>(g * groups.numbers * 4 + 4), ptx::permute_bytes(zero, zero, twice));
      }
    }
  }

  __device__ __forceinline__ void store_values(int part, int key) const {
    const unsigned column = to + static_cast<unsigned>(groups.value_begin * 4 + key * 2);
#pragma unroll
    for (int g = 0; g < groups.of_v; ++g) {
      const unsigned place = column + static_cast<unsigned>(g * groups.value_words * 4), shift = g % 2 * 16;
      const unsigned pair = tile::scale_pair<code, type>(scales[part], g / 2);
      ptx::store_shared(place, static_cast<unsigned short>(pair >> shift));
      if constexpr (groups.numbers > 1)
        ptx::store_shared(place + static_cast<unsigned>(groups.zero_words * 4),
                          static_cast<unsigned short>(zeros[part][g / 2] >> shift));
    }
  }

  /// The scales that are in registers to shared memory, where the warp's rows begin at `first_row`.
  __device__ __forceinline__ void store(int first_row, int lane) {
    if (to == 0) return;
    if constexpr (parts == 2) {
      if (lane < own_rows) store_keys(0, first_row + lane), store_values(1, first_row + lane);
    } else if (lane < own_rows) {
      store_keys(0, first_row + lane);
    } else if (lane < 2 * own_rows) {
      store_values(0, first_row + lane - own_rows);
    }
    to = 0;
  }
};

/// The scale of a lane's codes, and of int4 the zero: each twice.
struct GroupNumbers {
  unsigned scale, zero = 0;
};

/// S += Q K^T. load_Q(A, step) loads 16 columns of Q. load_codes(codes, n, unit) loads 16 keys, 64 columns.
/// numbers_of(half, n, chunk): those of the lane's key of `half`, and of its columns of chunk `chunk` of 32.
template <Type code, Type type, int steps, int blocks, typename LoadQ, typename LoadCodes, typename NumbersOf>
__device__ __forceinline__ void multiply_groups(float (&S)[1][blocks][4], LoadQ load_Q, LoadCodes load_codes,
                                                NumbersOf numbers_of) {
  static_assert(steps % 4 == 0);
// Of wide heads Q is not in registers, and nothing is loaded ahead: the sums of O leave no room.
#pragma unroll(steps > 8 ? 1 : steps / 4)
  for (int unit = 0; unit < steps / 4; ++unit) {
#pragma unroll
    for (int n = 0; n < blocks / 2; ++n) {
      unsigned codes[4];  // (keys 0-7, 32 columns), (keys 0-7, the next 32), (keys 8-15, 32), (keys 8-15, the next 32)
      load_codes(codes, n, unit);
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        unsigned pairs[2][4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const GroupNumbers of = numbers_of(half, n, 2 * unit + u);
#pragma unroll
          for (int p = 0; p < 4; ++p)
            pairs[half][p] = tile::scaled_pair<code, type>(codes[2 * half + u], p, of.scale, of.zero);
        }
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          unsigned A[4];
          load_Q(A, 4 * unit + 2 * u + s);
          const unsigned B[4] = {pairs[0][2 * s], pairs[0][2 * s + 1], pairs[1][2 * s], pairs[1][2 * s + 1]};
          tile::mma_pair<type>(S[0][2 * n], S[0][2 * n + 1], A, B);
        }
      }
    }
  }
}

/// O += P V. load_P(A, step) loads P of 16 keys. load_codes(codes, c, step) loads columns 64c to 64c + 63 of them,
/// transposed. numbers_of(half, step, chunk): those of the lane's two keys of `half`, and of its columns of a chunk of 32.
template <Type code, Type type, int steps, int blocks, typename LoadP, typename LoadCodes, typename NumbersOf>
__device__ __forceinline__ void add_groups(float (&O)[1][blocks][4], LoadP load_P, LoadCodes load_codes,
                                           NumbersOf numbers_of) {
  static_assert(blocks % 8 == 0);
#pragma unroll
  for (int step = 0; step < steps; ++step) {
    unsigned A[4];
    load_P(A, step);
#pragma unroll
    for (int c = 0; c < blocks / 8; ++c) {
      unsigned codes[4];  // (keys 0-7, 32 columns), (keys 8-15, 32 columns), and the next 32 columns
      load_codes(codes, c, step);
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const GroupNumbers first = numbers_of(0, step, 2 * c + u), second = numbers_of(1, step, 2 * c + u);
        unsigned pairs[2][4];
#pragma unroll
        for (int p = 0; p < 4; ++p) {
          pairs[0][p] = tile::scaled_pair<code, type>(codes[2 * u], p, first.scale, first.zero);
          pairs[1][p] = tile::scaled_pair<code, type>(codes[2 * u + 1], p, second.scale, second.zero);
        }
#pragma unroll
        for (int p = 0; p < 4; p += 2) {
          const unsigned B[4] = {pairs[0][p], pairs[1][p], pairs[0][p + 1], pairs[1][p + 1]};
          tile::mma_pair<type>(O[0][8 * c + 4 * u + p], O[0][8 * c + 4 * u + p + 1], A, B);
        }
      }
    }
  }
}

}  // namespace flash_attention::decode
