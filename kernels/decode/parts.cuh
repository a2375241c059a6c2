#pragma once

#include "abi/decode.h"
#include "decode/schedule.cuh"
#include "ptx/atomic.cuh"
#include "ptx/registers.cuh"
#include "tile/workspace.cuh"

// Where the blocks that share an item leave their parts of its result, and how the last of them knows that it is the last.
//
// DecodeRegion::arrivals: a word for each block, which counts who has come to the item that is cut at the block's end.
// DecodeRegion::parts: two parts for each block: of the item that began before it, and of the one that it began. Where
// splits are fixed, as many for both as an item may have there: the second part begins at second_part, the second block's
// at second_block.
//
// The words need no initialisation, since a memset would cost as much as a short call. A word is 48 bits of tag, made from
// its own address, and 16 bits of count. Whatever a workspace holds is no tag but by a chance of 2^-48, and then the first
// block to look puts the tag there with a count of 0; the last to arrive puts the count back to 0 for the next call.

namespace flash_attention::decode {

template <ForwardConfig config>
struct Parts {
  static constexpr bool splits = config.split_tiles > 0;
  using Word = unsigned long long;

  Word* words;
  float* parts;
  int rows = config.block_q;  // of a part
  int many = 1;               // parts of each of a block's two items

  __device__ __forceinline__ static long long offset(const AttentionArgs& args, DecodeRegion region) {
    return args.workspace_offsets[static_cast<int>(region)];
  }

  __device__ __forceinline__ explicit Parts(const AttentionArgs& args)
      : words(tile::workspace<Word>(args, DecodeRegion::arrivals)),
        parts(tile::workspace<float>(args, DecodeRegion::parts)) {
    if constexpr (config.row_grid || config.head_grid ||
                  config.item_blocks > 0) {  // blocks of another blockIdx.y or z have their own
      const int before = static_cast<int>(blockIdx.y + gridDim.y * blockIdx.z) * ptx::registers_fresh_grid();
      words += before;
      parts += 2ll * before * floats();
    }
    if constexpr (splits) {
      const long long bytes = offset(args, DecodeRegion::second_part) - offset(args, DecodeRegion::parts);
      rows = static_cast<int>(bytes / decode_part_bytes(config, 1));
      many = static_cast<int>((offset(args, DecodeRegion::second_block) - offset(args, DecodeRegion::parts)) / (2 * bytes));
    }
  }

  __device__ __forceinline__ Word tag_of(int block) const {
    Word tag = reinterpret_cast<Word>(words + block) * 0x9E3779B97F4A7C15ull;
    tag = (tag ^ tag >> 29) * 0xBF58476D1CE4E5B9ull;
    return tag & ~Word{0xffff};
  }

  /// Before arrive(), by everyone who will: the word counts from 0.
  __device__ __forceinline__ void prepare(int block) const {
    const Word found = ptx::load_relaxed(words + block);
    // Where this fails somebody else was faster.
    if ((found & ~Word{0xffff}) != tag_of(block)) ptx::compare_exchange(words + block, found, tag_of(block));
  }

  /// Brings `own` parts: whether all of `count` have come; what each block wrote before is then visible here.
  __device__ __forceinline__ bool arrive(int block, int count, int own = 1) const {
    const Word before = ptx::atomic_add_acq_rel(words + block, static_cast<Word>(own));
    if (static_cast<int>(before & 0xffff) + own < count) return false;
    ptx::store_global(words + block, tag_of(block));
    return true;
  }

  /// Part `slot` of all blocks'.
  __device__ __forceinline__ float* at(int slot) const { return parts + slot * floats(); }
  /// Part x of an item that block `first` begins.
  __device__ __forceinline__ static int slot_of(int first, int x) { return 2 * (first + x) + (x == 0 ? 1 : 0); }
  /// That of a split of an item whose first tile is tile `start` of all.
  __device__ __forceinline__ int slot_of_split(const Shares& shares, const Item<config>& item, int start, int split) const {
    const int tile = tile::max(item.first_tile, split * config.split_tiles), position = start + tile - item.first_tile;
    const int first = shares.block_of(start), block = shares.block_of(position);
    const int index =
        block == first ? split - item.split_of(item.first_tile) : (position - shares.begin_of(block)) / config.split_tiles;
    return (2 * block + (block == first ? 1 : 0)) * many + index;
  }
  __device__ __forceinline__ static long long value_offset(int row) {
    return static_cast<long long>(row) * config.head_dim_v;
  }
  __device__ __forceinline__ long long statistics_offset(int row) const {
    return static_cast<long long>(splits ? rows : config.block_q) * config.head_dim_v + 2 * row;
  }

 private:
  __device__ __forceinline__ long long floats() const {
    return decode_part_bytes(config, splits ? rows : config.block_q) / 4;
  }
};

}  // namespace flash_attention::decode
