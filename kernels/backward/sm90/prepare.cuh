#pragma once

// The launches around the main loop of backward/sm90: row statistics before it, conversion of fp32 sums after it.
//
//   prepare: lse2 = lse / ln 2 (+inf if a row has no probabilities), delta = rowsum(dO * O) - dlse; zeroes the sums of dQ
//            and the counter of tasks; writes the counters of ordered accumulation, zeros for rows in no sequence, and
//            flags of rows that are not finite. Dropout scales the probabilities that it keeps by k: with lse2 - log2 k
//            and delta / k the tiles need not multiply by it.
//   convert: dQ = scale * the sums, in the tensor's type
//   convert_keys: the same for dK and dV, if they are summed in memory
//
// One block of 128 threads takes 64 rows of one head.

#include "backward/sm90/parts/early_dq.cuh"
#include "backward/sm90/parts/ordered_sums.cuh"
#include "backward/sm90/parts/products.cuh"
#include "backward/sm90/parts/statistics.cuh"
#include "ptx/launch.cuh"
#include "ptx/memory.cuh"
#include "ptx/path.cuh"
#include "ptx/warp.cuh"
#include "tile/tail.cuh"

namespace flash_attention {
namespace backward_sm90 {

struct RowTile {
  tile::Sequence sequence;
  int head_idx;
  int q_begin;
  long long padded;  // first row of the tile in the padded layout of its head

  /// `first`: the tiles before are not of this launch.
  template <Features features>
  __device__ __forceinline__ static RowTile of_block(const AttentionArgs& args, int first = 0) {
    // In reverse order: prepare ends with the rows that backward_sm90_two_warpgroups_kernel begins with, and convert
    // begins with the rows that kernel ended with, so that they are still in L2.
    const int block_idx = first + static_cast<int>(gridDim.x - 1 - blockIdx.x);
    const auto block = tile::query_block(block_idx, tile::ceil_div(args.seq_q, tile_rows), args.heads_q);
    RowTile tile;
    tile.sequence = tile::make_sequence<features>(args, block.batch_idx);
    tile.head_idx = block.head_idx;
    tile.q_begin = block.tile_idx * tile_rows;
    tile.padded = block.head_idx * padded_rows(args) + padded_start(args, tile.sequence) + tile.q_begin;
    return tile;
  }
};

/// lse2 and delta of rows of whole tiles. Eight threads share a row and read 16 bytes each at a time; they have
/// `at_once` rows in flight.
struct RowFindings {
  bool nonfinite = false;  // a row is not finite, or may be
  bool left_out = false;   // a row has a statistic without parts (statistics.cuh)
};
template <BackwardConfig config, int threads, int at_once>
__device__ __forceinline__ RowFindings prepare_rows(const AttentionArgs& args, const RowTile& tile, int rows, int thread) {
  using Element = typename Shape<config>::Element;
  using Eight = ptx::Vector<unsigned, 4>;
  constexpr Type type = config.features.dtype;
  constexpr int stride = threads / 8, chunks = Shape<config>::chunks_v;
  const auto O = tile::query_rows<const Element, config.features>(args, args.O, tile.sequence, tile.head_idx);
  const auto dO = tile::query_rows<const Element, config.features>(args, args.dO, tile.sequence, tile.head_idx);
  const long long statistics = tile::statistics_offset<config.features>(args, tile.sequence, tile.head_idx);
  const bool drops = args.keep_scale != 1.0f;
  const float log2_keep = drops ? ptx::log2(args.keep_scale) : 0, keep = drops ? 1.0f / args.keep_scale : 1;
  const int lane = thread % 8;
  RowFindings found;
#pragma unroll(at_once* stride < tile_rows ? tile_rows / (at_once * stride) : 1)
  for (int first = thread / 8; first < rows; first += stride * at_once) {
    // All loads are issued before the first result is used, so that many are in flight.
    Eight o[at_once][chunks], d[at_once][chunks];
    float lse[at_once], dlse[at_once];
#pragma unroll
    for (int n = 0; n < at_once; ++n) {
      const long long i = tile.q_begin + first + stride * n;
      bool used = i < tile.sequence.len_q;
      if constexpr (config.features.stacked_heads != 0)
        used = used && tile::has_head<config.features>(args, static_cast<int>(i));
#pragma unroll
      for (int c = 0; c < chunks; ++c) {
        const int column = 8 * lane + 64 * c;
        const bool loaded = used && column < config.head_dim_v;
        if constexpr (config.features.stacked_heads != 0) {
          const int row = static_cast<int>(i);
          o[n][c] = loaded ? ptx::load_readonly(reinterpret_cast<const Eight*>(O.row(row) + column)) : Eight{};
          d[n][c] = loaded ? ptx::load_readonly(reinterpret_cast<const Eight*>(dO.row(row) + column)) : Eight{};
        } else {
          o[n][c] = loaded ? ptx::load_readonly(reinterpret_cast<const Eight*>(O.data + i * O.stride + column)) : Eight{};
          d[n][c] = loaded ? ptx::load_readonly(reinterpret_cast<const Eight*>(dO.data + i * dO.stride + column)) : Eight{};
        }
      }
      lse[n] = used && lane == 0 ? args.lse[statistics + tile::statistic_of<config.features>(args, i)] : -tile::infinity;
      dlse[n] = used && lane == 0 && args.dlse != nullptr
                    ? args.dlse[statistics + tile::statistic_of<config.features>(args, i)]
                    : 0;
    }
#pragma unroll
    for (int n = 0; n < at_once; ++n) {
      const int row = first + stride * n;
      bool used = tile.q_begin + row < tile.sequence.len_q;
      if constexpr (config.features.stacked_heads != 0)
        used = used && tile::has_head<config.features>(args, tile.q_begin + row);
      float sum = 0;
#pragma unroll
      for (int c = 0; c < chunks; ++c) {
#pragma unroll
        for (int p = 0; p < 4; ++p) {
          sum += ptx::unpack_low<type>(o[n][c][p]) * ptx::unpack_low<type>(d[n][c][p]) +
                 ptx::unpack_high<type>(o[n][c][p]) * ptx::unpack_high<type>(d[n][c][p]);
        }
      }
#pragma unroll
      for (int distance = 1; distance < 8; distance *= 2) sum += ptx::shuffle_xor(sum, distance);
      if (lane != 0 || row >= rows) continue;
      sum -= dlse[n];
      found.nonfinite =
          found.nonfinite || (used && (!(lse[n] < tile::infinity && lse[n] > -tile::infinity) || sum - sum != 0.0f));
      float lse2 = lse[n] < tile::lowest_lse ? tile::infinity : ptx::fma(lse[n], tile::log2_e, -log2_keep);
      const float delta = used ? sum * keep : 0;
      if constexpr (config.statistics_by_product) {
        Parts& parts = parts_of(args, tile.padded);
        lse2 = scaled_lse<type>(lse[n], args.scale, used);
        const bool has_lse = write_statistic<type>(parts.lse, row, lse2);
        const bool has_delta = write_statistic<type>(parts.delta, row, delta);
        found.left_out = found.left_out || !has_lse || !has_delta;
      }
      workspace<float>(args, Region::lse2)[tile.padded + row] = lse2;
      workspace<float>(args, Region::delta)[tile.padded + row] = delta;
    }
  }
  return found;
}

/// Zeroes the sums of dK and dV and their counters, all blocks of the grid together; or only those of the first keys.
template <BackwardConfig config>
__device__ __forceinline__ void zero_key_sums(const AttentionArgs& args) {
  using S = Shape<config>;
  using Four = ptx::Vector<float, 4>;
  const long long all_rows = (args.total_kv + static_cast<long long>(config.block_kv) * args.batch) * args.heads_kv;
  const long long rows = config.key_sums ? all_rows : static_cast<long long>(config.block_kv) * args.heads_kv * args.batch;
  const auto zero = [&](auto* first, long long count) {
    for (long long i = static_cast<long long>(blockIdx.x) * wg_threads + threadIdx.x; i < count;
         i += static_cast<long long>(gridDim.x) * wg_threads)
      ptx::store_global(first + i, {});
  };
  zero(workspace<Four>(args, Region::dK), rows * S::width / 4);
  zero(workspace<Four>(args, Region::dV), rows * S::width_v / 4);
  if constexpr (S::ordered) zero(dkv_order_of(args, 0), tile::ceil_div(rows, static_cast<long long>(warp_keys)));
}

/// The order of sums in memory: 16 rows of a warp, in the order of its registers, 8 columns after 8 columns. dQ is by
/// lanes, four registers of each (four neighbouring lanes hold 8 columns of two rows). dK and dV are by registers, 32
/// lanes of each.
enum class SumOrder { by_lane, by_register };
template <typename Element>
__device__ __forceinline__ long long strides_of(const tile::Rows<Element>& rows) {
  return rows.stride;
}
template <typename Element, int stack>
__device__ __forceinline__ long long strides_of(const tile::RowsOfStack<Element, stack>& rows) {
  return rows.stride | rows.head_stride;
}
template <Type type, int dim, SumOrder order, typename Rows>
__device__ __forceinline__ void convert_rows(const float* sums, const Rows& rows, float factor, int lane) {
  using Four = ptx::Vector<float, 4>;
  constexpr int groups = dim / 8;
  constexpr bool by_lane = order == SumOrder::by_lane;
  const bool aligned = (reinterpret_cast<unsigned long long>(rows.data) | strides_of(rows) * 2) % 16 == 0;
#pragma unroll 4
  for (int i = lane; i < 8 * groups; i += 32) {
    const int group = i % groups, row = i / groups;
    const Four* from = reinterpret_cast<const Four*>(sums) + group * 32 + (by_lane ? 4 * row : row);
    Four four[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) four[n] = ptx::load_global(from + (by_lane ? n : 8 * n));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + 8 * half >= rows.count) continue;
      if constexpr (Rows::may_have_gaps) {
        if (rows.is_gap(row + 8 * half)) continue;
      }
      ptx::Vector<unsigned, 4> eight;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float low = by_lane ? four[n][2 * half] : four[2 * half][n];
        const float high = by_lane ? four[n][2 * half + 1] : four[2 * half + 1][n];
        eight[n] = ptx::pack<type>(low * factor, high * factor);
      }
      store_eight(rows.row(row + 8 * half) + 8 * group, eight, aligned);
    }
  }
}

}  // namespace backward_sm90

template <abi::BackwardConfig config>
__device__ __forceinline__ void backward_sm90_prepare(const abi::AttentionArgs& args) {
  using namespace backward_sm90;
  ptx::griddepcontrol_launch_dependents();
  if (blockIdx.x == 0 && threadIdx.x < num_counters) workspace<unsigned>(args, Region::tasks)[threadIdx.x] = 0;
  if (config.key_sums || splits_first<config>(args)) zero_key_sums<config>(args);
  tile::clear_gradient_tails<config>(args, threadIdx.x, wg_threads);
  if (args.seq_q == 0 || args.batch == 0) return;
  const RowTile tile = RowTile::of_block<config.features>(args);
  if (tile.q_begin >= tile.sequence.rows_q) return;
  if constexpr (config.early_dq) {
    if (tile.q_begin == 0 && threadIdx.x < 32) count_missing_sums<config>(args, tile.sequence, tile.head_idx, threadIdx.x);
  }
  unsigned first_in_order = 0;
  if constexpr (Shape<config>::ordered) {
    first_in_order = first_key_tile<config>(args, tile.sequence, tile.head_idx, tile.q_begin) | none_accumulated;
    if (threadIdx.x == 0) *dq_order_of(args, tile.padded) = first_in_order;
  }
  if (!Shape<config>::separate_dq && (!Shape<config>::ordered || first_in_order == ~0u)) {
    constexpr int pieces = tile_rows * Shape<config>::width / 4;
    auto* sums =
        reinterpret_cast<ptx::Vector<float, 4>*>(workspace<float>(args, Region::dQ) + tile.padded * Shape<config>::width);
    for (int piece = threadIdx.x; piece < pieces; piece += wg_threads)
      ptx::store_global(sums + piece, ptx::Vector<float, 4>{});
  }
  constexpr int chunks = Shape<config>::chunks_v, at_once = chunks > 2 ? 1 : 4 / chunks;
  const RowFindings found = prepare_rows<config, wg_threads, at_once>(args, tile, tile_rows, threadIdx.x);
  const bool nonfinite = ptx::any(found.nonfinite);
  auto* const nonfinite_flags = reinterpret_cast<unsigned char*>(nonfinite_flags_of(args, tile.padded));
  static_assert(wg_threads / 32 == sizeof(unsigned), "a byte for each warp");
  if (threadIdx.x % 32 == 0) nonfinite_flags[threadIdx.x / 32] = nonfinite ? 1 : 0;
  if constexpr (config.statistics_by_product) {
    Parts& parts = parts_of(args, tile.padded);
    const bool left_out = ptx::any(found.left_out);
    if (threadIdx.x % 32 == 0) reinterpret_cast<unsigned char*>(&parts.flags)[threadIdx.x / 32] = left_out ? 1 : 0;
    if (threadIdx.x < sizeof(parts.zeros) / 4) parts.zeros[threadIdx.x] = 0;
  }
}

template <abi::BackwardConfig config>
__device__ __forceinline__ void backward_sm90_convert(const abi::AttentionArgs& args) {
  ptx::path<"backward/sm90 dQ summed">();
  using namespace backward_sm90;
  using S = Shape<config>;
  const int tiles_of_head = tile::ceil_div(args.seq_q, tile_rows);
  const RowTile tile = RowTile::of_block<config.features>(args, config.early_dq ? args.early_heads * tiles_of_head : 0);
  if (tile.q_begin >= tile.sequence.rows_q) return;
  const int first_row = 16 * (threadIdx.x / 32), lane = threadIdx.x % 32;
  const auto dQ = tile::query_rows<typename S::Element, config.features>(args, args.dQ, tile.sequence, tile.head_idx);
  const float* sums = workspace<float>(args, Region::dQ) + (tile.padded + first_row) * S::width;
  convert_rows<S::type, config.head_dim, SumOrder::by_lane>(sums, dQ.from(tile.q_begin + first_row), args.scale, lane);
}

namespace backward_sm90 {

/// For a warp: converts 16 rows of dK and dV, from the row `padded` of the sums on.
template <BackwardConfig config>
__device__ __forceinline__ void convert_key_rows(const AttentionArgs& args, const tile::Sequence& sequence, int kv_head_idx,
                                                 int first_row, long long padded, int lane) {
  using S = Shape<config>;
  const auto dK = tile::key_rows<typename S::Element, config.features>(args.dK, sequence, kv_head_idx).from(first_row);
  const auto dV = tile::key_rows<typename S::Element, config.features>(args.dV, sequence, kv_head_idx).from(first_row);
  if (dK.count <= 0) return;
  const float* sums_dK = workspace<float>(args, Region::dK) + padded * S::width;
  const float* sums_dV = workspace<float>(args, Region::dV) + padded * S::width_v;
  convert_rows<S::type, config.head_dim, SumOrder::by_register>(sums_dK, dK, 1, lane);
  convert_rows<S::type, config.head_dim_v, SumOrder::by_register>(sums_dV, dV, 1, lane);
}

}  // namespace backward_sm90

template <abi::BackwardConfig config>
__device__ __forceinline__ void backward_sm90_convert_keys(const abi::AttentionArgs& args) {
  ptx::path<"backward/sm90 dK summed">();
  using namespace backward_sm90;
  const auto block = tile::key_block(blockIdx.x, tile::ceil_div(args.seq_kv, tile_rows), args.heads_kv);
  const auto sequence = tile::make_sequence<config.features>(args, block.batch_idx);
  const int first_row = block.tile_idx * tile_rows + 16 * (threadIdx.x / 32), lane = threadIdx.x % 32;
  const long long padded = padded_key<config>(args, sequence, block.head_idx) + first_row;
  convert_key_rows<config>(args, sequence, block.head_idx, first_row, padded, lane);
}

}  // namespace flash_attention
