#pragma once

#include "abi/config.h"
#include "tile/largest_score.cuh"

// The launch before a forward kernel that raises the largest score of each sequence and head (tile/largest_score.cuh):
//
//   for each sequence and head, a thread each:  max_logit = -inf

namespace flash_attention {

using namespace abi;

template <ForwardConfig config>
__device__ __forceinline__ void forward_clear_max_logit(const AttentionArgs& args) {
  const int head = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (head < args.batch * args.heads_q) args.max_logit[head] = -tile::infinity;
}

}  // namespace flash_attention
