#pragma once

#include "ptx/shared.cuh"
#include "tile/copy.cuh"
#include "tile/dropout.cuh"
#include "tile/fma_product.cuh"
#include "tile/mma.cuh"
#include "tile/score.cuh"
#include "tile/workspace.cuh"

// Shared by the sm80 backward kernels: tiles, loads, and the step from dot products to probabilities and their
// gradients.

namespace flash_attention {

using namespace abi;

/// A flag in shared memory that any thread of the block may raise.
struct SharedFlag {
  unsigned raised;
  __device__ __forceinline__ void set(bool up) { ptx::store_shared(ptx::shared_address(&raised), up ? 1u : 0u); }
  __device__ __forceinline__ bool up() const { return ptx::load_shared<unsigned>(ptx::shared_address(&raised)) != 0; }
};

template <BackwardConfig config>
struct BackwardSm80Shape {
  static constexpr Features features = config.features;
  static constexpr Type type = features.dtype;
  static constexpr int block_q = config.block_q, block_kv = config.block_kv;
  static constexpr int threads = 32 * config.num_warps;
  static constexpr int dim = tile::round_up(config.head_dim, 16), dim_v = tile::round_up(config.head_dim_v, 16);
  // Warps along the rows of a product over queries or keys: each has 32 rows, so that one load of B feeds four
  // instructions.
  static constexpr int warps_q = block_q / 32, warps_kv = block_kv / 32;
  static constexpr bool floats = type == Type::float32;
  // Floats are multiplied in two parts each (tile/split.cuh) in backward/tf32, and in fp32 (tile/fma_product.cuh) in
  // backward/fp32.
  static constexpr bool fp32_products = features.fp32_products, split = floats && !fp32_products;
  // A NaN or Inf that is hidden from some rows reaches them through 0 * NaN; such rows are computed again. So are rows
  // that see an Inf which was split in two parts.
  static constexpr bool repairs_rows = tile::Visibility<features>::hides || features.dropout || floats;
  // Tensor cores keep nothing below 2^-136, red.global.add nothing below 2^-126. So P and dS as factors of tensor
  // cores, and the sums of dQ, are scaled up by these powers of two; dK, dV and dQ are divided by them at the end. Rows
  // that overflow are computed again.
  static constexpr float weight_scale = split ? 0x1p24f : 1, query_scale = floats ? 0x1p24f : 1;
  using Element = ptx::Element<type>;
  static_assert(block_q % 32 == 0 && block_kv % 32 == 0);
  static_assert(config.num_warps % warps_q == 0 && config.num_warps % warps_kv == 0);

  static constexpr int halves = sizeof(Element) / 2;  // columns of a 16-bit tile that an element takes
  using QTile = tile::SwizzledTile<block_q, halves * dim>;
  using dOTile = tile::SwizzledTile<block_q, halves * dim_v>;
  using KTile = tile::SwizzledTile<block_kv, halves * dim>;
  using VTile = tile::SwizzledTile<block_kv, halves * dim_v>;
  using PTile = tile::SwizzledTile<block_q, halves * block_kv>;

  /// A query tile with the statistics of its rows.
  struct Stage {
    QTile Q;
    dOTile dO;
    float lse[block_q];
    float delta[block_q];
  };

  __device__ __forceinline__ static tile::Rows<const Element> queries(const TensorView& view,
                                                                      const tile::Sequence& sequence, int head_idx) {
    auto rows = tile::query_rows<const Element, features>(view, sequence, head_idx);
    rows.count = sequence.len_q;
    return rows;
  }
  __device__ __forceinline__ static tile::Rows<const Element> keys(const TensorView& view, const tile::Sequence& sequence,
                                                                   int kv_head_idx) {
    auto rows = tile::key_rows<const Element, features>(view, sequence, kv_head_idx);
    rows.count = sequence.visible_kv;
    return rows;
  }

  template <typename Tile, int columns>
  __device__ __forceinline__ static void load(const tile::Rows<const Element>& from, unsigned tile_address) {
    tile::copy_tile_async<threads, columns, Tile>(tile_address, from, threadIdx.x);
  }

  __device__ __forceinline__ static bool some_hidden(const tile::Visibility<features>& sight, int q_begin, int kv_begin) {
    return q_begin + block_q > sight.len_q || !sight.template all_visible<block_q, block_kv>(q_begin, kv_begin);
  }

  __device__ __forceinline__ static const float* delta_of(const AttentionArgs& args) {
    return tile::workspace<const float>(args, BackwardRegion::delta);
  }

  /// Starts to copy lse and delta of a query tile, one after the other. Rows that do not exist get zeros.
  __device__ __forceinline__ static void load_statistics(const AttentionArgs& args, const tile::Sequence& sequence,
                                                         int head_idx, int q_begin, unsigned address) {
    const int thread = threadIdx.x, row = thread % block_q;
    static_assert(threads >= 2 * block_q);
    if (thread >= 2 * block_q) return;
    const float* from = thread < block_q ? args.lse : delta_of(args);
    const long long offset = tile::statistics_offset<features>(args, sequence, head_idx) + q_begin + row;
    ptx::copy_async_small<4>(address + 4 * thread, from + offset, q_begin + row < sequence.len_q ? 4 : 0);
  }

  /// lse and delta of the rows that a lane holds.
  template <int m_tiles>
  struct RowStatistics {
    float lse[m_tiles][2];  // for exp2 if not floats; +inf for a row without keys, whose probabilities become 0
    float delta[m_tiles][2];

    __device__ __forceinline__ void set(int m, int half, float row_lse, float row_delta) {
      lse[m][half] = row_lse < tile::lowest_lse ? tile::infinity : floats ? row_lse : row_lse * tile::log2_e;
      delta[m][half] = row_delta;
    }

    /// From a Stage in shared memory.
    __device__ __forceinline__ RowStatistics(unsigned address, int first_row) {
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const unsigned row = address + 4 * (first_row + 16 * m + 8 * half);
          set(m, half, ptx::load_shared<float>(row), ptx::load_shared<float>(row + 4 * block_q));
        }
      }
    }

    /// From global memory.
    __device__ __forceinline__ RowStatistics(const AttentionArgs& args, const tile::Sequence& sequence, int head_idx,
                                             int first_row) {
      const long long offset = tile::statistics_offset<features>(args, sequence, head_idx);
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int i = first_row + 16 * m + 8 * half;
          const bool exists = i < sequence.len_q;
          set(m, half, exists ? args.lse[offset + i] : -tile::infinity, exists ? delta_of(args)[offset + i] : 0);
        }
      }
    }
  };

  /// S, dot products, becomes P (0 if dropped, without the factor of dropout). dP becomes dS at the dot product,
  /// without the scale. Row and column are the place of the fragment's first element in the sequence.
  template <bool some_hidden, int m_tiles, int blocks>
  __device__ __forceinline__ static void differentiate(float (&S)[m_tiles][blocks][4], float (&dP)[m_tiles][blocks][4],
                                                       const tile::Score<features>& score,
                                                       const RowStatistics<m_tiles>& rows, const tile::Dropout& dropout,
                                                       int row, int column, const tile::LanePlace& place) {
    const float scale_log2 = score.unit_scale() * tile::log2_e;
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) {
      const int first = row + 16 * m + place.row;
      const tile::KeyRange ranges[2] = {score.sight.keys_of(first), score.sight.keys_of(first + 8)};
#pragma unroll
      for (int pair = 0; pair < blocks / 2; ++pair) {
        tile::DropoutWords random;
        if constexpr (features.dropout) {
          random = dropout.words(tile::Dropout::row_counter(first),
                                 tile::Dropout::column_counter(column + 16 * pair + place.column));
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int i = first + 8 * half;
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int j = column + 16 * pair + e / 2 * 8 + place.column + e % 2;
            float& s = S[m][2 * pair + e / 2][2 * half + e % 2];
            float& ds = dP[m][2 * pair + e / 2][2 * half + e % 2];
            if (some_hidden && !score.sight.visible(ranges[half], i, j)) {
              s = ds = 0;
              continue;
            }
            float slope = 1;
            if constexpr (!tile::Score<features>::linear) {
              s = score.capped(s, slope);
              s = score.programmed(s + score.added(i, j), i, j, slope);
              if (features.score_program && s == -tile::infinity) {
                s = ds = 0;
                continue;
              }
            }
            // In float32 the rounding error of lse * log2(e) would be visible, because it is an error of the exponent.
            // So would that of lse, unless a score that outweighs all others is rounded in the same way
            // (tile::exact_lse).
            s = floats ? tile::exp(ptx::multiply(s, score.unit_scale()) - rows.lse[m][half])
                       : ptx::exp2(ptx::fma(s, scale_log2, -rows.lse[m][half]));
            if constexpr (split) s *= weight_scale;
            if constexpr (features.dropout) {
              const bool keeps = random.at(half, e / 2, e % 2) >= dropout.threshold;
              ds = s * ((keeps ? ds * dropout.keep_scale : 0) - rows.delta[m][half]) * slope;
              if (!keeps) s = 0;
            } else {
              ds = s * (ds - rows.delta[m][half]) * slope;
            }
          }
        }
      }
    }
  }

  /// Rounds two neighbours of a fragment's block of eight columns and stores them to a tile.
  template <typename Tile>
  __device__ __forceinline__ static void put_pair(unsigned tile_address, int row, int block, const tile::LanePlace& place,
                                                  float first, float second) {
    if constexpr (floats) {
      const unsigned offset = Tile::offset(row, 2 * block + place.column / 4) + place.column % 4 * 4;
      ptx::store_shared(tile_address + offset, ptx::Vector<float, 2>{{first, second}});
    } else {
      ptx::store_shared(tile_address + Tile::offset(row, block) + 2 * place.column, ptx::pack<type>(first, second));
    }
  }

  /// The same for neighbours of a result: a gradient of Q, K or V.
  template <typename Tile>
  __device__ __forceinline__ static void put_result(unsigned tile_address, int row, int block, const tile::LanePlace& place,
                                                    float first, float second) {
    if constexpr (fp32_products) {
      const unsigned offset = tile::fma_offset<Tile>(row, block, place.column / 2);
      ptx::store_shared(tile_address + offset, ptx::Vector<float, 2>{{first, second}});
    } else {
      put_pair<Tile>(tile_address, row, block, place, first, second);
    }
  }

  /// Rounds a fragment and stores it to a tile. store_result is for a gradient of Q.
  template <typename Tile, int m_tiles, int blocks>
  __device__ __forceinline__ static void store_result(const float (&C)[m_tiles][blocks][4], unsigned tile_address, int row,
                                                      int column, const tile::LanePlace& place) {
    store<Tile, true>(C, tile_address, row, column, place);
  }
  template <typename Tile, bool is_result = false, int m_tiles, int blocks>
  __device__ __forceinline__ static void store(const float (&C)[m_tiles][blocks][4], unsigned tile_address, int row,
                                               int column, const tile::LanePlace& place) {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
      for (int n = 0; n < blocks; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float first = C[m][n][2 * half], second = C[m][n][2 * half + 1];
          if constexpr (is_result) {
            put_result<Tile>(tile_address, row + 16 * m + place.row + 8 * half, column / 8 + n, place, first, second);
          } else {
            put_pair<Tile>(tile_address, row + 16 * m + place.row + 8 * half, column / 8 + n, place, first, second);
          }
        }
      }
    }
  }
};

}  // namespace flash_attention
