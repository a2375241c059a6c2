#pragma once

#include "tile/sequence.cuh"

// Scales of 8-bit Q, K and V. If all rows of a head share a scale, it is a factor of the scale of the scores, or of the
// last factor of the output. If a row has its own scale, it multiplies the row's score or probability.

namespace flash_attention::tile {

/// The scale of a sequence and key head.
__device__ __forceinline__ float scale_of_head(const ScaleView& scales, int batch_idx, int kv_head_idx) {
  return scales.data[batch_idx * scales.batch_stride + kv_head_idx * scales.head_stride];
}

/// The scale of K or V; 1 if there is none, or if each row has its own.
template <Features features>
__device__ __forceinline__ float head_scale(const ScaleView& scales, int batch_idx, int kv_head_idx) {
  if constexpr (!features.kv_scales || features.token_scales) return 1;
  return scale_of_head(scales, batch_idx, kv_head_idx);
}

/// The address of the scale of row j of a page.
__device__ __forceinline__ const float* scale_of_row(const ScaleView& scales, long long page, long long row,
                                                     int kv_head_idx) {
  return scales.data + page * scales.batch_stride + row * scales.seq_stride + kv_head_idx * scales.head_stride;
}

/// The scale of key j, which is visible.
template <Features features>
__device__ __forceinline__ float token_scale(const AttentionArgs& args, const ScaleView& scales, const Sequence& sequence,
                                             int kv_head_idx, int j) {
  if constexpr (!features.token_scales) return 1;
  if constexpr (features.paged) {
    const int entry = args.page_table[sequence.batch_idx * args.page_table_stride + j / args.page_size];
    return *scale_of_row(scales, max(0, min(entry, args.num_pages - 1)), j % args.page_size, kv_head_idx);
  }
  return *scale_of_row(scales, features.packed ? 0 : sequence.batch_idx, sequence.start_kv + j, kv_head_idx);
}

/// The dot product with a latent key, from that with its value and that with its own columns.
template <Features features>
__device__ __forceinline__ float latent_dot(const AttentionArgs& args, const Sequence& sequence, int kv_head_idx, int j,
                                            float of_value, float of_own) {
  if constexpr (features.token_scales) {
    of_value *= token_scale<features>(args, args.V_scale, sequence, kv_head_idx, j);
    of_own *= token_scale<features>(args, args.K_scale, sequence, kv_head_idx, j);
  } else if constexpr (features.kv_scales) {
    of_value *= head_scale<features>(args.V_scale, sequence.batch_idx, kv_head_idx);
    of_own *= head_scale<features>(args.K_scale, sequence.batch_idx, kv_head_idx);
  }
  return of_value + of_own;
}

}  // namespace flash_attention::tile
