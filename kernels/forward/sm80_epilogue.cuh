#pragma once

#include "forward/repair.cuh"
#include "forward/sm80.cuh"

// The epilogue of forward/sm80: O / sum -> shared -> global, 16 bytes per lane; lse; rows that 0 * NaN has reached again.

namespace flash_attention {

/// Writes lse, and O through the warp's own rows of shared memory.
template <ForwardConfig config>
__device__ __forceinline__ void ForwardSm80<config>::finish() {
  // Where the block is, worked out once more, from an index that the compiler cannot recognise: kept through the main
  // loop it would cost registers that are not there.
  const auto block = block_of(args, ptx::registers_fresh(blockIdx.x));
  const tile::Sequence sequence = tile::make_sequence<features>(args, block.batch_idx);
  const int head_idx = block.head_idx, q_begin = block.tile_idx * block_q;
  const float scale_log2 = score.unit_scale() * tile::log2_e;
  float sink = -tile::infinity;
  if constexpr (features.sink) sink = args.sink[head_idx];
  float lse[m_tiles][2];
  float check = 0;  // NaN if anything is not finite
#pragma unroll
  for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + 16 * m + place.row + 8 * half, i = q_begin + row;
      const bool used = i < sequence.len_q;
      float factor = rows[m].template finish<log2_P_scale>(half, scale_log2, used ? sink : -tile::infinity, lse[m][half]);
      if constexpr (features.dropout) factor *= args.keep_scale;
      if (!used) factor = 0, lse[m][half] = -tile::infinity;
      if (args.lse != nullptr && place.column == 0 && i < sequence.rows_q) {
        args.lse[tile::statistics_offset<features>(args, sequence, head_idx) + i] = lse[m][half];
      }
#pragma unroll
      for (int n = 0; n < dim_v / 8; ++n) {
        float first = O[m][n][2 * half] * factor, second = O[m][n][2 * half + 1] * factor;
        if (factor == 0) first = second = 0;
        if constexpr (repairs_rows) check = ptx::fma(first, 0, ptx::fma(second, 0, check));
        if constexpr (split) {
          const unsigned offset = OTile::offset(row, 2 * n + place.column / 4) + place.column % 4 * 4;
          ptx::store_shared(Q_smem + offset, ptx::Vector<float, 2>{{first, second}});
        } else {
          ptx::store_shared(Q_smem + OTile::offset(row, n) + 2 * place.column, ptx::pack<type>(first, second));
        }
      }
    }
  }
  __syncwarp();  // the warp's rows are in shared memory
  if constexpr (repairs_rows) {
    if (ptx::any(check != check)) {
#pragma unroll 1
      for (int r = 0; r < rows_per_warp; ++r) {
        float row_lse = 0;
#pragma unroll
        for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) row_lse = r / 8 == 2 * m + half ? lse[m][half] : row_lse;
        }
        ptx::path<split ? "forward/tf32 repaired row" : "forward/sm80 repaired row">();
        row_lse = ptx::shuffle(row_lse, r % 8 * 4);
        if constexpr (split) row_lse = repair_lse<config>(args, sequence, head_idx, q_begin + warp_row + r, row_lse);
        repair_output<config, OTile>(args, sequence, head_idx, q_begin + warp_row + r, row_lse, Q_smem, warp_row + r);
      }
      __syncwarp();  // the rows have been replaced
    }
  }
  const auto to = tile::query_rows<Element, features>(args.O, sequence, head_idx).from(q_begin);
  tile::store_tile<32, config.head_dim_v, rows_per_warp, OTile>(Q_smem, warp_row, to, lane);
}

}  // namespace flash_attention
