#pragma once

#include "ptx/registers.cuh"
#include "ptx/warp.cuh"

// A matrix descriptor of wgmma in two words. To move its start, only the low word changes, without a carry.

namespace flash_attention::tile {

/// With `by_shuffle` the low word goes through a shuffle, so the compiler knows that all lanes have the same and keeps
/// it in uniform registers, from which wgmma reads its descriptors. With `fresh` it is computed again for each product:
/// if the addresses of all steps were kept from one KV block to the next, they would fill the registers.
template <bool by_shuffle, bool fresh = false>
struct Descriptor {
  unsigned low;
  unsigned high;

  __device__ __forceinline__ explicit Descriptor(unsigned long long whole) {
    low = static_cast<unsigned>(whole);
    if constexpr (fresh) low = ptx::hide_from_compiler(low);
    if constexpr (by_shuffle) low = ptx::shuffle(low, 0);
    high = static_cast<unsigned>(whole >> 32);
  }
  /// The descriptor of a start that is `bytes` later.
  __device__ __forceinline__ unsigned long long at(int bytes) const {
    return static_cast<unsigned long long>(high) << 32 | (low + bytes / 16);
  }
};

}  // namespace flash_attention::tile
