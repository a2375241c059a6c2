#pragma once

// Merges the rows of forward/sm90 whose keys were split between work tiles. A warp has eight rows and 64 columns.
//
//     weight of a part = its sum * 2^(exponent_scale (its reference - the largest of all))
//     O = sum of weight * O of the part / sum of weights;  lse

#include "abi/args.h"
#include "abi/config.h"
#include "abi/forward_sm90.h"
#include "ptx/convert.cuh"
#include "ptx/launch.cuh"
#include "ptx/memory.cuh"
#include "ptx/path.cuh"
#include "tile/math.cuh"
#include "tile/workspace.cuh"

namespace flash_attention::forward_sm90 {

// The parts in the workspace. Work tiles with the same rows write them: for each split of the keys, O, normalised by
// the sum of the split, and two statistics a row.
using namespace abi;

template <ForwardConfig config>
struct SplitParts {
  using Pair = ptx::Vector<float, 2>;

  // 64 rows of O are stored together, in the layout of a warpgroup's registers:
  // [split, head, row / 64, registers / 4, warp, 4, lane].
  // Register i of a lane is row 16 warp + lane / 4 + 8 (i / 2 % 2), column 8 (i / 4) + 2 (lane % 4) + i % 2.
  static constexpr int group_rows = 64;
  static constexpr int width = tile::round_up(config.head_dim_v, 32);

  float* O;
  // The reference (a score; -inf if the row sees nothing) and the sum of 2^(exponent_scale (score - reference)).
  Pair* statistics;
  int heads;  // number of heads, over all sequences
  int seq_q;
  int groups;  // groups of 64 rows for each head, including the rows of the last tile that do not exist

  __device__ __forceinline__ explicit SplitParts(const AttentionArgs& args)
      : O(tile::workspace<float>(args, ForwardSm90Region::O)),
        statistics(tile::workspace<Pair>(args, ForwardSm90Region::statistics)),
        heads(args.batch * args.heads_q),
        seq_q(args.seq_q),
        groups(forward_sm90_part_groups(args.seq_q)) {}

  /// The 64 rows from first_row on.
  __device__ __forceinline__ float* rows_at(int split, int head_of_batch, int first_row) const {
    const long long place = static_cast<long long>(split * heads + head_of_batch) * groups + first_row / group_rows;
    return O + place * (group_rows * width);
  }
  __device__ __forceinline__ Pair* statistics_at(int split, int head_of_batch, int row) const {
    return statistics + static_cast<long long>(split * heads + head_of_batch) * seq_q + row;
  }
};

}  // namespace flash_attention::forward_sm90

namespace flash_attention {

template <abi::ForwardConfig config>
__device__ __forceinline__ void forward_sm90_merge(const abi::AttentionArgs& args) {
  ptx::path<"forward/sm90 splits are merged">();
  using Parts = forward_sm90::SplitParts<config>;
  constexpr abi::Type type = config.features.dtype;
  constexpr int pieces = tile::ceil_div(config.head_dim_v, 64), blocks = tile::min(Parts::width, 64) / 8;
  const Parts parts(args);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int item = static_cast<int>(blockIdx.x) * config.num_warps + static_cast<int>(threadIdx.x) / 32;
  const int piece = item % pieces, eights = tile::ceil_div(args.seq_q, 8);
  const int head_of_batch = item / pieces / eights, row = (item / pieces - head_of_batch * eights) * 8 + lane / 4;
  ptx::griddepcontrol_wait();  // the parts are complete
  if (head_of_batch >= parts.heads || row >= args.seq_q) return;

  float largest = -tile::infinity;
#pragma unroll 4
  for (int split = 0; split < args.num_splits; ++split)
    largest = ptx::max(largest, ptx::load_global(parts.statistics_at(split, head_of_batch, row))[0]);
  const float exponent_scale = args.scale * tile::log2_e;
  const float reference = largest == -tile::infinity ? 0 : largest;

  // The lane's places among the registers of a warpgroup.
  const int place = row % 64 / 16 * 128 + row / 8 % 2 * 64 + lane + piece * 8 * 512;
  float O[2 * blocks] = {}, sum = 0;
#pragma unroll 2
  for (int split = 0; split < args.num_splits; ++split) {
    const float* const part = parts.rows_at(split, head_of_batch, row) + place;
    const auto statistics = ptx::load_global(parts.statistics_at(split, head_of_batch, row));
    const float weight = statistics[1] * ptx::exp2((statistics[0] - reference) * exponent_scale);
    sum += weight;
#pragma unroll
    for (int i = 0; i < 2 * blocks; ++i) {
      if (piece * 64 + i / 2 * 8 < config.head_dim_v)
        O[i] = ptx::fma(weight, ptx::load_global(part + i / 2 * 512 + i % 2 * 32), O[i]);
    }
  }
  const float factor = sum == 0 ? 0 : ptx::reciprocal(sum);

  const int batch_idx = head_of_batch / args.heads_q, head_idx = head_of_batch - batch_idx * args.heads_q;
  auto* const out = static_cast<ptx::Element<type>*>(args.O.data) + batch_idx * args.O.batch_stride +
                    head_idx * args.O.head_stride + row * args.O.seq_stride;
#pragma unroll
  for (int block = 0; block < blocks; ++block) {
    const int column = piece * 64 + block * 8 + lane % 4 * 2;
    if (column < config.head_dim_v) {
      const unsigned pair = ptx::pack<type>(O[2 * block] * factor, O[2 * block + 1] * factor);
      ptx::store_global(reinterpret_cast<unsigned*>(out + column), pair);
    }
  }
  if (args.lse != nullptr && lane % 4 == 0 && piece == 0) {
    args.lse[static_cast<long long>(head_of_batch) * args.seq_q + row] =
        sum == 0 ? -tile::infinity : (reference * exponent_scale + ptx::log2(sum)) * tile::ln_2;
  }
}

}  // namespace flash_attention
