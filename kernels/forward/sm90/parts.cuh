#pragma once

// Where the work tiles that share a row's keys leave their parts of its result, in the workspace: of each split of the keys
// O, normalised by the split's own sum, and two statistics a row. forward/sm90/merge.cuh makes rows of them.

#include "abi/args.h"
#include "abi/config.h"
#include "abi/forward_sm90.h"
#include "ptx/memory.cuh"
#include "tile/math.cuh"
#include "tile/workspace.cuh"

namespace flash_attention::forward_sm90 {

using namespace abi;

template <ForwardConfig config>
struct SplitParts {
  using Pair = ptx::Vector<float, 2>;

  // 64 rows of O are together, as a warpgroup has them in registers: [split, head, row / 64, registers / 4, warp, 4, lane].
  // Register i of a lane is row 16 warp + lane / 4 + 8 (i / 2 % 2), column 8 (i / 4) + 2 (lane % 4) + i % 2.
  static constexpr int group_rows = 64;
  static constexpr int width = tile::round_up(config.head_dim_v, 32);

  float* O;
  // The reference, a score, or -inf where the row sees nothing; the sum of 2^(exponent_scale (score - reference)).
  Pair* statistics;
  int heads;  // of all sequences
  int seq_q;
  int groups;  // of rows, for each head: as many as all tiles have

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
