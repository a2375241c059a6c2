#pragma once

#include "backward/portable.cuh"
#include "ptx/atomic.cuh"

// The gradients of the tensors that a program reads: sums of dS * d score / d element, however the program indexes
// them. Terms are added as integers, so that the sum is the same in any order. Four kernels:
//
//   clear    the sums and the limits become 0
//   limits   the largest term of each tensor; it determines a unit in which no sum overflows
//   sums     the terms are rounded to that unit and added
//   finish   sums become floats
//
// In the second and third a block takes 64 queries of one head and all of their keys, as in backward/portable.cuh.

namespace flash_attention {

/// Calls use(tensor, place, term) for all terms of the block's queries. At each call `tensor` is a compile-time
/// constant.
template <BackwardConfig config, typename Use>
__device__ __forceinline__ void for_each_program_term(const AttentionArgs& args, Use use) {
  using Kernel = BackwardPortable<config>;
  constexpr int block_rows = tile::block_rows;
  auto& storage = ptx::shared_storage<typename Kernel::SharedStorage>();
  const auto block = tile::query_block(blockIdx.x, tile::ceil_div(args.seq_q, block_rows), args.heads_q);
  const tile::Sequence sequence = tile::make_sequence<config.features>(args, block.batch_idx);
  const int q_begin = block.tile_idx * block_rows;
  if (q_begin >= sequence.len_q) return;
  const typename Kernel::Head head(args, sequence, block.head_idx);
  const auto tiles = head.score.sight.template key_tiles<block_rows, block_rows>(q_begin);
  const tile::ThreadPlace place;
#pragma unroll 1
  for (int tile_idx = tiles.begin; tile_idx < tiles.end; ++tile_idx) {
    const int kv_begin = tile_idx * block_rows;
    if (head.skips(q_begin, kv_begin)) continue;
    typename Kernel::Gradients gradients;
    gradients.template compute<Kernel::Gradients::At::program>(head, q_begin, kv_begin, head.some_hidden(q_begin, kv_begin),
                                                               storage);
#pragma unroll 1
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        float ds = 0, before = 0;
#pragma unroll
        for (int row = 0; row < 4; ++row) {
          ds = row == r ? gradients.dS[row][c] : ds;
          before = row == r ? gradients.P[row][c] : before;
        }
        if (tile::is_hidden(ds) || ds == 0) continue;
        const auto& program = head.score.program;
        program.derivatives(before, program.row(q_begin + place.row + r), program.key(kv_begin + place.column + c),
                            [&](int tensor, int element, float slope) { use(tensor, element, ds * slope); });
      }
    }
  }
}

template <BackwardConfig config>
__device__ __forceinline__ void backward_program_clear(const AttentionArgs& args) {
  const long long first = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (first < program_tensors) args.program.limits[first] = 0;
#pragma unroll 1
  for (int tensor = 0; tensor < program_tensors; ++tensor) {
    if (args.program.sums[tensor] == nullptr) continue;
    for (long long n = first; n < args.program.counts[tensor]; n += static_cast<long long>(gridDim.x) * blockDim.x)
      args.program.sums[tensor][n] = 0;
  }
}

template <BackwardConfig config>
__device__ __forceinline__ void backward_program_limits(const AttentionArgs& args) {
  float limits[program_tensors] = {};
  for_each_program_term<config>(args, [&](int tensor, int, float term) {
    const float size = ptx::abs(term);
    if (!(size <= limits[tensor])) limits[tensor] = size < tile::infinity ? size : tile::infinity;
  });
#pragma unroll
  for (int tensor = 0; tensor < program_tensors; ++tensor) {
    if (limits[tensor] > 0) ptx::reduce_max(args.program.limits + tensor, __builtin_bit_cast(unsigned, limits[tensor]));
  }
}

/// 2^shift: in these units, all terms of a tensor together stay below 2^61. Returns 0 if there are no terms, or one is
/// not finite.
__device__ __forceinline__ double program_unit(const AttentionArgs& args, int tensor, int sign) {
  const unsigned bits = args.program.limits[tensor];
  if (bits == 0 || bits >= 0x7f800000u) return 0;
  const int shift = args.program.room - (static_cast<int>(bits >> 23) - 127);
  return __builtin_bit_cast(double, static_cast<unsigned long long>(1023 + sign * shift) << 52);
}

template <BackwardConfig config>
__device__ __forceinline__ void backward_program_sums(const AttentionArgs& args) {
  // A thread adds up its terms for the same element before it writes them. If the tensor is one number, or one for each
  // head, those are all of its terms.
  int last[program_tensors] = {};
  long long pending[program_tensors] = {};
  const auto flush = [&](int tensor) {
    if (pending[tensor] != 0) ptx::reduce_add(args.program.sums[tensor] + last[tensor], pending[tensor]);
  };
  for_each_program_term<config>(args, [&](int tensor, int element, float term) {
    if (args.program.counts[tensor] == 0) return;
    const double scaled = static_cast<double>(term) * program_unit(args, tensor, 1);
    const long long rounded = static_cast<long long>(scaled < 0 ? scaled - 0.5 : scaled + 0.5);
    if (element != last[tensor]) {
      flush(tensor);
      last[tensor] = element, pending[tensor] = 0;
    }
    pending[tensor] += rounded;
  });
#pragma unroll
  for (int tensor = 0; tensor < program_tensors; ++tensor) flush(tensor);
}

template <BackwardConfig config>
__device__ __forceinline__ void backward_program_finish(const AttentionArgs& args) {
  const long long first = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
#pragma unroll 1
  for (int tensor = 0; tensor < program_tensors; ++tensor) {
    if (args.program.sums[tensor] == nullptr) continue;
    const bool finite = args.program.limits[tensor] < 0x7f800000u;
    const double unit = program_unit(args, tensor, -1);
    for (long long n = first; n < args.program.counts[tensor]; n += static_cast<long long>(gridDim.x) * blockDim.x) {
      const float sum = static_cast<float>(static_cast<double>(args.program.sums[tensor][n]) * unit);
      args.program.gradients[tensor][n] = finite ? sum : __builtin_bit_cast(float, 0x7fffffffu);
    }
  }
}

}  // namespace flash_attention
