#pragma once

// What the hidden rows of the keys of a unit have in common.

#include "abi/key_bounds.h"
#include "ptx/warp.cuh"
#include "tile/math.cuh"

namespace flash_attention::mask {

/// Of the unit's keys among rows_kv, in all lanes of a warp. `rows` are those of the first key.
template <int hidden_bounds>
__device__ __forceinline__ abi::KeyBounds bounds_of(const int* rows, int unit, int rows_kv) {
  abi::KeyBounds bounds = abi::no_bounds();
  const int end = tile::min((unit + 1) * abi::mask_unit, rows_kv);
  for (int key = unit * abi::mask_unit + static_cast<int>(threadIdx.x) % 32; key < end; key += 32)
    take_key(bounds, rows + key * hidden_bounds, hidden_bounds);
#pragma unroll
  for (int which = 0; which < 2; ++which) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      const auto other = [&](int value) { return ptx::shuffle_xor(value, distance); };
      bounds.begin_max[which] = tile::max(bounds.begin_max[which], other(bounds.begin_max[which]));
      bounds.end_max[which] = tile::max(bounds.end_max[which], other(bounds.end_max[which]));
      bounds.begin_min[which] = tile::min(bounds.begin_min[which], other(bounds.begin_min[which]));
      bounds.end_min[which] = tile::min(bounds.end_min[which], other(bounds.end_min[which]));
    }
  }
  return bounds;
}

}  // namespace flash_attention::mask
