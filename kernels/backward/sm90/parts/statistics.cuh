#pragma once

// Row statistics that the tensor cores subtract (BackwardConfig::statistics_by_product):
//
//     S = Q K^T - lse / scale        P = 2^(scale log2(e) S)
//     dP = dO V^T - delta            dS = P dP
//
// If threads load and subtract the statistics, they take a share of shared memory's time, which the products need. Here
// each statistic is a sum of three parts, 16-bit numbers of the tensors' type. One more step of its product adds them:
// [64 x 16] of weights times [16 x 64] of parts, of which three rows count. This step is the last one, so that large
// dot products lose nothing before they cancel.
//
// For a tile of 64 queries, prepare.cuh writes and bulk copies load (Parts):
//
//     -lse / scale   for each eight queries: 8 first parts, 8 second, 8 third        48 bytes, 8 times
//     -delta         the same
//     zeros          a product reads eight rows of each group, 128 bytes: after the parts, those of later groups, times 0
//     flags          a byte for each warp of prepare: some row has no parts
//
// All parts are finite, so a part times 0 is 0. If a statistic is not finite or too large, its parts are 0; its tile is
// flagged, and threads subtract the missing numbers.

#include "backward/sm90/parts/shape.cuh"
#include "ptx/tma.cuh"

namespace flash_attention::backward_sm90 {

constexpr int statistics_parts = 3;

struct alignas(16) Parts {
  unsigned short lse[tile_rows / 8][statistics_parts][8];
  unsigned short delta[tile_rows / 8][statistics_parts][8];
  unsigned zeros[20];
  unsigned flags;
  unsigned unused[3];

  static constexpr int group_bytes = statistics_parts * 16;  // of eight queries
};
static_assert(sizeof(Parts) % 16 == 0 && sizeof(Parts) <= tile_rows * backward_sm90_parts_row_bytes);
static_assert(sizeof(Parts::lse) + sizeof(Parts::delta) + sizeof(Parts::zeros) >= 15 * Parts::group_bytes + 128);

__device__ __forceinline__ Parts& parts_of(const AttentionArgs& args, long long padded) {
  return *reinterpret_cast<Parts*>(workspace<char>(args, Region::parts) + padded * backward_sm90_parts_row_bytes);
}

/// The left operand. All of its rows are alike; here are eight of them, first their first eight columns, then the
/// others.
struct alignas(16) PartWeights {
  unsigned rows[2][8][4];
};

using Pair = ptx::Vector<float, 2>;

/// The statistics of each stage, for threads or for products to subtract.
template <int stages, bool by_product>
struct StatisticsTiles {
  static constexpr int stage_bytes = 2 * tile_rows * 4;
  float lse2[stages][tile_rows];
  float delta[stages][tile_rows];

  /// Loads the statistics of a tile that begins at a padded row.
  __device__ __forceinline__ void load(const AttentionArgs& args, int stage, const long long& padded, ptx::Mbarrier& full) {
    ptx::bulk_load(lse2[stage], workspace<float>(args, Region::lse2) + padded, tile_rows * 4, full);
    ptx::bulk_load(delta[stage], workspace<float>(args, Region::delta) + padded, tile_rows * 4, full);
  }

  /// The statistics that a thread subtracts for queries 8 group + 2 (lane % 4) and the next one.
  __device__ __forceinline__ Pair lse2_of(int stage, int group, int lane) const {
    return *reinterpret_cast<const Pair*>(&lse2[stage][8 * group + 2 * (lane % 4)]);
  }
  __device__ __forceinline__ Pair delta_of(int stage, int group, int lane) const {
    return *reinterpret_cast<const Pair*>(&delta[stage][8 * group + 2 * (lane % 4)]);
  }
  __device__ __forceinline__ static constexpr bool is_flagged(int) { return false; }
};
template <int stages>
struct StatisticsTiles<stages, true> {
  static constexpr int stage_bytes = sizeof(Parts);
  Parts parts[stages];
  PartWeights weights;

  __device__ __forceinline__ void load(const AttentionArgs& args, int stage, const long long& padded, ptx::Mbarrier& full) {
    ptx::bulk_load(&parts[stage], &parts_of(args, padded), sizeof(Parts), full);
  }

  __device__ __forceinline__ static constexpr Pair lse2_of(int, int, int) { return {}; }
  __device__ __forceinline__ static constexpr Pair delta_of(int, int, int) { return {}; }
  /// Whether some rows of the tile have statistics without parts: then subtract_rest() must be called.
  __device__ __forceinline__ bool is_flagged(int stage) const { return parts[stage].flags != 0; }
};

/// The weight of a part. Parts of float16 must not become subnormal: the smaller ones are stored as larger numbers.
template <Type type>
__device__ __forceinline__ constexpr float part_weight(int part) {
  if (type == Type::bfloat16 || part == 0) return 1.0f;
  return part == 1 ? 0x1p-11f : 0x1p-14f;
}
/// Statistics below this limit have parts.
template <Type type>
constexpr float parts_limit = type == Type::bfloat16 ? 0x1p126f : 0x1p15f;

/// For each of 64 threads: writes a word of the weights. The products see them after a fence and a barrier.
template <Type type>
__device__ __forceinline__ void write_part_weights(PartWeights& weights, int thread) {
  const unsigned first = ptx::pack<type>(part_weight<type>(0), part_weight<type>(1));
  const unsigned second = ptx::pack<type>(part_weight<type>(2), 0.0f);
  const int piece = thread % 4;
  if (thread < 64) (&weights.rows[0][0][0])[thread] = thread >= 32 || piece > 1 ? 0 : piece == 0 ? first : second;
}

/// Writes x as a sum of weighted parts.
template <Type type>
__device__ __forceinline__ void write_parts(unsigned short (&parts)[statistics_parts][8], int query, float x) {
#pragma unroll
  for (int part = 0; part < statistics_parts; ++part) {
    const float weight = part_weight<type>(part);
    const unsigned bits = ptx::pack<type>(x * (1.0f / weight), 0.0f);
    x -= ptx::unpack_low<type>(bits) * weight;
    parts[part][query] = static_cast<unsigned short>(bits);
  }
}

/// lse / scale of a row. A row without probabilities has the infinity that makes its exponents -inf. A row past the
/// last query, whose dot products are 0, has a number that makes its exponents small enough.
template <Type type>
__device__ __forceinline__ float scaled_lse(float lse, float scale, bool used) {
  const float large = used ? tile::infinity : 0.5f * parts_limit<type>;
  if (lse < tile::lowest_lse) return scale < 0 ? -large : large;
  return lse / scale;
}

/// Writes the parts of a row's statistic. Returns whether it has parts.
template <Type type>
__device__ __forceinline__ bool write_statistic(unsigned short (&parts)[tile_rows / 8][statistics_parts][8], int row,
                                                float x) {
  const bool has_parts = ptx::abs(x) < parts_limit<type>;
  write_parts<type>(parts[row / 8], row % 8, has_parts ? -x : 0.0f);
  return has_parts;
}

/// D += the statistics, as three parts each. The products before it have been issued.
template <Type type>
__device__ __forceinline__ void issue_parts(float (&D)[tile_rows / 2], const PartWeights& weights, const void* parts,
                                            int fresh) {
  const unsigned long long A_desc = ptx::wgmma_descriptor(&weights, sizeof(weights.rows[0]), 0, 0) + fresh;
  const unsigned long long B_desc = ptx::wgmma_descriptor(parts, 0, Parts::group_bytes, 0) + fresh;
  ptx::wgmma_ss<type, tile_rows, ptx::Major::k, ptx::Major::mn>(D, A_desc, B_desc, true);
}

/// For a flagged tile: subtracts the statistics without parts, which are in memory, from scores or from dP.
template <Type type>
__device__ __forceinline__ void subtract_rest(float (&scores)[tile_rows / 2], const float* statistics, int lane) {
  const auto* const pairs = reinterpret_cast<const Pair*>(statistics) + lane % 4;
#pragma unroll
  for (int group = 0; group < tile_rows / 8; ++group) {
    const Pair pair = pairs[4 * group];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float rest = ptx::abs(pair[e]) < parts_limit<type> ? 0.0f : pair[e];
      scores[4 * group + e] -= rest, scores[4 * group + 2 + e] -= rest;
    }
  }
}

}  // namespace flash_attention::backward_sm90
