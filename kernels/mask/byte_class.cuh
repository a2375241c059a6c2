#pragma once

// What a boolean mask says of a tile, by one thread: for maps without words (tile_map.cuh).

#include "abi/args.h"
#include "abi/tile_map.h"
#include "ptx/memory.cuh"
#include "tile/sequence.cuh"

namespace flash_attention::mask {

/// What a boolean mask says of the rows [first, last] and the keys of a unit: 16 bytes at a time where they are so
/// aligned, and of several rows at once.
__device__ __forceinline__ abi::TileClass byte_class(const abi::AttentionArgs& args, const tile::Sequence& sequence,
                                                     int head_idx, int first, int last, int unit) {
  using abi::mask_unit, abi::TileClass;
  constexpr int rows_at_once = 2;
  const int begin = unit * mask_unit, count = tile::min(mask_unit, sequence.rows_kv - begin);
  const auto* const mask = static_cast<const unsigned char*>(args.mask.data) + sequence.batch_idx * args.mask.batch_stride +
                           head_idx * args.mask.head_stride + begin;
  const bool aligned =
      count == mask_unit &&
      (reinterpret_cast<unsigned long long>(mask) | static_cast<unsigned long long>(args.mask.q_stride)) % 16 == 0;
  bool some = false, all = true;
  for (int i = first; i <= last && (all || !some); i += rows_at_once) {
    if (aligned) {
      ptx::Vector<unsigned, 4> words[rows_at_once][mask_unit / 16];
#pragma unroll
      for (int r = 0; r < rows_at_once; ++r) {
        const auto* const row =
            reinterpret_cast<const ptx::Vector<unsigned, 4>*>(mask + tile::min(i + r, last) * args.mask.q_stride);
#pragma unroll
        for (int piece = 0; piece < mask_unit / 16; ++piece) words[r][piece] = ptx::load_global(row + piece);
      }
#pragma unroll
      for (int r = 0; r < rows_at_once; ++r) {
#pragma unroll
        for (int x = 0; x < mask_unit / 4; ++x) {
          const unsigned word = words[r][x / 4][x % 4];
          some = some || word != 0;
          all = all && ((word - 0x01010101u) & ~word & 0x80808080u) == 0;  // no byte is 0
        }
      }
    } else {
      for (int r = i; r <= tile::min(i + rows_at_once - 1, last); ++r) {
        for (int j = 0; j < count; ++j) {
          const bool visible = mask[r * args.mask.q_stride + j] != 0;
          some = some || visible;
          all = all && visible;
        }
      }
    }
  }
  return !some ? TileClass::none : all ? TileClass::full : TileClass::partial;
}

}  // namespace flash_attention::mask
