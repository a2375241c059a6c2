#pragma once

// What the warps of forward/sm90 tell each other if masks choose the blocks of keys (Shape::listed).

#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"

namespace flash_attention::forward_sm90 {

/// A block of keys that the masks show something of, where they choose (Shape::listed).
struct ListedBlock {
  int word = 0;

  __device__ __forceinline__ ListedBlock() = default;
  __device__ __forceinline__ ListedBlock(int block, bool tested, bool raises, bool masked)
      : word(block * 16 + (tested ? 1 : 0) + (raises ? 2 : 0) + (masked ? 8 : 0)) {}
  __device__ __forceinline__ explicit ListedBlock(int stored) : word(stored) {}

  __device__ __forceinline__ int block() const { return word / 16; }
  __device__ __forceinline__ bool tested() const { return (word & 1) != 0; }   // some pair may be hidden
  __device__ __forceinline__ bool raises() const { return (word & 2) != 0; }   // it raises the maximum
  __device__ __forceinline__ bool is_last() const { return (word & 4) != 0; }  // of the tile
  __device__ __forceinline__ bool masked() const { return (word & 8) != 0; }   // the masks may hide some, not edges alone
};

/// Of a row and a block of keys: bit l of word k is of key l * (block_kv / 32) + k.
template <int block_kv>
using MaskWords = ptx::Vector<unsigned, block_kv / 32 < 2 ? 1 : block_kv / 32>;

constexpr int mask_warps = 3;  // of the producer warpgroup: they make the words

/// Which pairs of a tested block are visible, by warpgroup and row.
template <bool present, int warpgroups, int rows, int block_kv>
struct MaskStorage {
  ptx::Mbarrier full[warpgroups], empty[warpgroups];  // as of the other rings, which are longer
  MaskWords<block_kv> words[warpgroups][rows];
};
template <int warpgroups, int rows, int block_kv>
struct MaskStorage<false, warpgroups, rows, block_kv> {};

/// A unit of the scheduler, as a block remembers it: next to words of masks there is little room.
template <bool is_small>
struct UnitNumberOf {
  using Type = int;
};
template <>
struct UnitNumberOf<true> {
  using Type = unsigned short;
};
template <bool is_small>
using UnitNumber = typename UnitNumberOf<is_small>::Type;

}  // namespace flash_attention::forward_sm90
