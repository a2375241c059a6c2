#pragma once

#include "decode/tiles.cuh"
#include "ptx/matrix.cuh"
#include "tile/group_pairs.cuh"

// The products with K and V in 4 bits, turned: S^T = K Q^T and O^T = V^T P^T. Keys and columns of V are the 16 rows of a
// product, and the query rows its 8 columns. So 8 query rows need half of the products and of the registers that 16 would,
// and a register of codes is multiplied for all of them.
//
//   K: lane (g, t) = (lane / 4, lane % 4) reads 16 bytes of the rows of keys g and g + 8: 32 neighbouring columns, whose
//      scales are its own. The columns of a product may have any order, so Q's registers hold the columns of the lane's
//      codes.
//   S: rows are keys g and g + 8, columns query rows 2t and 2t + 1. Transposing them makes P^T as the second operand.
//   V: ldmatrix transposes 16 bits, four columns. Lane (g, t) has columns 4g to 4g + 3 of keys 2t and 2t + 1, a register
//      of codes. Code n of both halves is a pair of keys.
//   O: rows 2t and 2t + 1 of columns 4g to 4g + 3 of 32 are in two products, of which each has two of the columns.
//
// A pair of codes is code n of both halves of a register: of K columns c and c + 4, of V keys 2t and 2t + 1.

namespace flash_attention::decode {

using namespace abi;

template <ForwardConfig config>
struct Turned {
  static constexpr Features features = config.features;
  static constexpr Type code = features.kv_dtype, type = features.dtype;
  static constexpr DecodeGroups groups{config};
  static constexpr int dim = config.head_dim, dim_v = config.head_dim_v;
  static constexpr int words = dim / 32;                         // of a lane's codes of a key
  static constexpr int row_tiles = config.block_q <= 8 ? 1 : 2;  // of 8 query rows
  static constexpr int sum_blocks = row_tiles * dim_v / 16;
  using Element = ptx::Element<type>;
  using Queries = typename DecodeTiles<config>::Q;

  /// The first of the eight columns of a lane's word of codes: a lane has 32 neighbouring columns of 128, or 16 of the
  /// last 64.
  __device__ __forceinline__ static int column_of(int word, int t) {
    const int unit = word / 4 * 128;
    return unit + (unit + 128 <= dim ? 32 : 16) * t + word % 4 * 8;
  }

  /// Stores Q of an item; all threads share the work. row(r): the address of query row r, null if it does not exist.
  template <typename Row>
  __device__ __forceinline__ static void store_Q(Queries& Q, Row row) {
    const int lane = threadIdx.x % 32;
    for (int index = threadIdx.x / 32; index < row_tiles * words; index += config.num_warps) {
      const int r = index / words, w = index % words;
      const Element* from = row(8 * r + lane / 4);
      ptx::Vector<unsigned, 4> columns{}, pairs;
      if (from != nullptr)
        columns = ptx::load_readonly(reinterpret_cast<const ptx::Vector<unsigned, 4>*>(from + column_of(w, lane % 4)));
#pragma unroll
      for (int n = 0; n < 4; ++n)
        pairs[n] = ptx::permute_bytes(columns[n / 2], columns[2 + n / 2], n % 2 == 0 ? 0x5410u : 0x7632u);
      ptx::store_shared(ptx::shared_address(&Q.words[r][w][lane]), pairs);
    }
  }

  struct Numbers {
    unsigned scale[2], zero[2];  // of the groups of a lane's first and last 16 columns, each twice
  };

  /// The numbers of a lane's columns of unit `unit`. `row`: of a key's scales, or zeros.
  __device__ __forceinline__ static void load_numbers(unsigned (&numbers)[2], unsigned row, int unit, int t) {
    const unsigned place = row + static_cast<unsigned>(column_of(4 * unit, t) / features.kv_group * 2);
    if (features.kv_group == 16 && unit * 128 + 128 <= dim) {
      const auto pair = ptx::load_shared<unsigned>(place);
      numbers[0] = ptx::permute_bytes(pair, pair, 0x1010u), numbers[1] = ptx::permute_bytes(pair, pair, 0x3232u);
    } else {
      const unsigned number = ptx::load_shared<unsigned short>(place);
      numbers[0] = numbers[1] = ptx::permute_bytes(number, number, 0x1010u);
    }
  }

  /// S += K Q^T for 16 keys, from `first` on.
  template <typename Tile>
  __device__ __forceinline__ static void multiply_keys(float (&S)[row_tiles][4], unsigned Q, unsigned K, unsigned scales,
                                                       int first, int lane) {
    const int t = lane % 4;
#pragma unroll
    for (int unit = 0; 128 * unit < dim; ++unit) {
      const bool whole = unit * 128 + 128 <= dim;
      unsigned codes[2][4];
      Numbers numbers[2]{};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = first + 8 * half + lane / 4;
        if (whole) {
          const auto loaded = ptx::load_shared<ptx::Vector<unsigned, 4>>(K + Tile::offset(key, 4 * unit + t));
#pragma unroll
          for (int w = 0; w < 4; ++w) codes[half][w] = loaded[w];
        } else {
          const auto loaded =
              ptx::load_shared<ptx::Vector<unsigned, 2>>(K + Tile::offset(key, 4 * unit + t / 2) + t % 2 * 8);
          codes[half][0] = loaded[0], codes[half][1] = loaded[1];
        }
        const unsigned row = scales + static_cast<unsigned>(key * groups.key_bytes);
        load_numbers(numbers[half].scale, row, unit, t);
        if constexpr (groups.numbers > 1) load_numbers(numbers[half].zero, row + groups.key_zeros, unit, t);
      }
#pragma unroll
      for (int w = 0; w < (whole ? 4 : 2); ++w) {
        ptx::Vector<unsigned, 4> B[row_tiles];
#pragma unroll
        for (int r = 0; r < row_tiles; ++r)
          B[r] = ptx::load_shared<ptx::Vector<unsigned, 4>>(
              Q + static_cast<unsigned>(((r * words + 4 * unit + w) * 32 + lane) * 16));
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          unsigned A[4];
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const Numbers& of = numbers[e % 2];
            A[e] = tile::scaled_pair<code, type>(codes[e % 2][w], 2 * step + e / 2, of.scale[w / 2], of.zero[w / 2]);
          }
#pragma unroll
          for (int r = 0; r < row_tiles; ++r) {
            const unsigned of_step[2] = {B[r][2 * step], B[r][2 * step + 1]};
            ptx::mma_m16n8k16<type>(S[r], A, of_step);
          }
        }
      }
    }
  }

  /// Rows of scales of two neighbouring keys, one after the other.
  static constexpr int row_words = groups.value_bytes / 2;
  __device__ __forceinline__ static void load_rows(unsigned (&rows)[row_words], unsigned from) {
    constexpr int width = row_words % 4 == 0 ? 4 : row_words % 2 == 0 ? 2 : 1;
#pragma unroll
    for (int first = 0; first < row_words; first += width) {
      const auto loaded = ptx::load_shared<ptx::Vector<unsigned, width>>(from + static_cast<unsigned>(4 * first));
#pragma unroll
      for (int i = 0; i < width; ++i) rows[first + i] = loaded[i];
    }
  }

  /// The numbers of two keys for the lane's columns of 32 c to 32 c + 31.
  __device__ __forceinline__ static unsigned value_pair(const unsigned (&rows)[row_words], int c, int lane) {
    const int first = 32 * c / features.kv_group, second = first + groups.of_v;
    unsigned halves = (first % 2 == 0 ? 0x10u : 0x32u) | (second % 2 == 0 ? 0x5400u : 0x7600u);
    if (features.kv_group == 16 && lane >= 16) halves = 0x7632u;  // columns 16 to 31
    return ptx::permute_bytes(rows[first / 2], rows[second / 2], halves);
  }

  /// O += V^T P^T for 16 keys, from `first` on. P: their probabilities as the second operand.
  template <typename Tile>
  __device__ __forceinline__ static void add_values(float (&O)[1][sum_blocks][4], const unsigned (&P)[row_tiles][2],
                                                    unsigned V, unsigned scales, int first, int lane) {
    unsigned rows[2][row_words], zero_rows[2][row_words];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned from = scales + static_cast<unsigned>((first + 8 * half + lane % 4 * 2) * groups.value_bytes);
      load_rows(rows[half], from + groups.values);
      if constexpr (groups.numbers > 1) load_rows(zero_rows[half], from + groups.value_zeros);
    }
#pragma unroll
    for (int c = 0; c < dim_v / 64; ++c) {
      unsigned codes[4];  // (keys 0-7, 32 columns), (keys 8-15, 32 columns), and the next 32 columns
      ptx::ldmatrix_x4_trans(codes, V + Tile::offset(first + lane % 16, 2 * c + lane / 16));
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        unsigned scale[2], zero[2]{};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          scale[half] = value_pair(rows[half], 2 * c + u, lane);
          if constexpr (groups.numbers > 1) zero[half] = value_pair(zero_rows[half], 2 * c + u, lane);
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          unsigned A[4];
#pragma unroll
          for (int e = 0; e < 4; ++e)
            A[e] = tile::scaled_pair<code, type>(codes[2 * u + e / 2], 2 * j + e % 2, scale[e / 2], zero[e / 2]);
#pragma unroll
          for (int r = 0; r < row_tiles; ++r) ptx::mma_m16n8k16<type>(O[0][r * (dim_v / 16) + 4 * c + 2 * u + j], A, P[r]);
        }
      }
    }
  }
};

/// The running maximum and sum of query rows 2t and 2t + 1 of each 8, for keys g and g + 8 of each 16: tile::RowState with
/// the keys of a lane's scores along the rows of a product.
template <int row_tiles>
struct TurnedRows {
  float max[row_tiles][2];
  float sum[row_tiles][2];  // this lane's part

  __device__ __forceinline__ TurnedRows() {
#pragma unroll
    for (int r = 0; r < row_tiles; ++r) max[r][0] = max[r][1] = -tile::infinity, sum[r][0] = sum[r][1] = 0;
  }

  /// Combines the lanes that have other keys of the same rows.
  template <typename Combine>
  __device__ __forceinline__ static float reduce(float value, Combine combine) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) value = combine(value, ptx::shuffle_xor(value, step));
    return value;
  }

  /// take(row, maximum, sum) for each row, called by the lane that has it.
  template <typename Take>
  __device__ __forceinline__ void for_each_row(int lane, Take take) const {
#pragma unroll
    for (int r = 0; r < row_tiles; ++r) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float total = reduce(sum[r][e], [](float a, float b) { return a + b; });
        if (lane < 4) take(8 * r + 2 * lane + e, max[r][e], total);
      }
    }
  }

  /// S becomes 2^log2_P_scale times the probabilities.
  template <int log2_P_scale, int key_tiles>
  __device__ __forceinline__ void update(float (&S)[key_tiles][row_tiles][4], float scale_log2,
                                         float (&rescale)[row_tiles][2]) {
#pragma unroll
    for (int r = 0; r < row_tiles; ++r) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float new_max = max[r][e];
#pragma unroll
        for (int m = 0; m < key_tiles; ++m) new_max = ptx::max(new_max, ptx::max(S[m][r][e], S[m][r][2 + e]));
        new_max = reduce(new_max, [](float a, float b) { return ptx::max(a, b); });
        // For a row that has seen nothing the arithmetic stays finite: exp2(-inf - 0) = 0.
        const float origin = new_max == -tile::infinity ? 0 : new_max;
        rescale[r][e] = ptx::exp2((max[r][e] - origin) * scale_log2);
        max[r][e] = new_max;
        float total = 0;
#pragma unroll
        for (int m = 0; m < key_tiles; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float& score = S[m][r][2 * half + e];
            score = ptx::exp2(ptx::fma(score - origin, scale_log2, log2_P_scale));
            total += score;
          }
        }
        constexpr float unscale = 1.0f / (1 << log2_P_scale);
        sum[r][e] = ptx::fma(sum[r][e], rescale[r][e], total * unscale);
      }
    }
  }
};

}  // namespace flash_attention::decode
