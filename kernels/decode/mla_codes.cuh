#pragma once

#include "decode/mla_storage.cuh"
#include "tile/narrow_pairs.cuh"

// Latent keys of 8 bits in decode/mla_sm90. The codes of a part are copied into the second half of its memory and
// become 16-bit elements there, a panel at a time:
//
//   part of four panels, blocks of 4 KiB:   0 1 | 2 3 | 4 5 | 6 7       codes of panels 3, 2, 1, 0 in blocks 4, 5, 6, 7
//   panel 0: 7 -> 0 1;  panel 1: 6 -> 2 3;  panel 3: 4 -> 6 7;  panel 2: 5 -> 4 5
//
// A panel goes in two halves of its rows: each is read whole, by one warp, before any of it is written, and the first half
// of a panel is never where codes of the second are.

namespace flash_attention::mla {

template <Type code, Type type>
struct Codes {
  static constexpr int block_bytes = mla_block_kv * 64;
  static constexpr int unit_bytes = 16;  // that a lane copies at once

  /// Where unit `unit` of the codes of a row of `panels` panels is in their part. Odd panels change the rows of a pair,
  /// so that lanes that copy two panels of a row meet other banks.
  template <int panels>
  __device__ __forceinline__ static unsigned offset(int row, int unit) {
    const int panel = unit / 4;
    return static_cast<unsigned>((2 * panels - 1 - panel) * block_bytes + (row ^ (panel & 1)) * 64 + unit % 4 * unit_bytes);
  }

  /// The codes of a part, which have landed, become elements.
  template <int panels>
  __device__ __forceinline__ static void expand(unsigned part_smem, int lane) {
    expand_panel<panels, 0>(part_smem, lane);
    if constexpr (panels == 4) {
      expand_panel<panels, 1>(part_smem, lane);
      expand_panel<panels, 3>(part_smem, lane);
      expand_panel<panels, 2>(part_smem, lane);
    }
  }

 private:
  template <int panels, int panel>
  __device__ __forceinline__ static void expand_panel(unsigned part_smem, int lane) {
    using Unit = ptx::Vector<unsigned, 4>;
    constexpr int units = block_bytes / unit_bytes / 64;  // of a lane, in half of the rows
#pragma unroll 1
    for (int begin = 0; begin < 64 * units; begin += 32 * units) {
      Unit codes[units];
#pragma unroll
      for (int i = 0; i < units; ++i) {
        const int index = begin + 32 * i + lane;
        codes[i] = ptx::load_shared<Unit>(part_smem + offset<panels>(index / 4, 4 * panel + index % 4));
      }
      __syncwarp();  // all codes of these rows have been read
#pragma unroll
      for (int i = 0; i < units; ++i) {
        const int index = begin + 32 * i + lane, row = index / 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const tile::TwoPairs low = tile::to_pairs<code, type>(codes[i][2 * half]);
          const tile::TwoPairs high = tile::to_pairs<code, type>(codes[i][2 * half + 1]);
          ptx::store_shared(part_smem + panel * StageTile::panel_bytes + StageTile::offset(row, index % 4 * 2 + half),
                            Unit{{low.first, low.second, high.first, high.second}});
        }
      }
      __syncwarp();  // what comes next may be where codes were
    }
  }
};

}  // namespace flash_attention::mla
