#pragma once

// The end of a tile in forward/sm90_fp8: divide by the row sums, write lse, store O through shared memory. A row that a
// hidden NaN or Inf has reached through a product with 0 is computed again.

#include "forward/repair.cuh"
#include "forward/sm90_fp8/consumer.cuh"
#include "ptx/matrix_store.cuh"
#include "ptx/path.cuh"
#include "tile/copy.cuh"
#include "tile/swizzle.cuh"

namespace flash_attention::forward_sm90_fp8 {

template <ForwardConfig config>
struct Epilogue {
  using S = Shape<config>;
  using OutputTile = typename Warpgroup<config>::OutputTile;
  using StoredTile = tile::SwizzledTile<wg_rows, S::o_chunks * o_chunk_dim>;
  static constexpr Features features = config.features;
  static_assert(sizeof(StoredTile) <= sizeof(SharedStorage<config>::O[0]));

  const Warpgroup<config>& wg;
  const unsigned thread;

  __device__ __forceinline__ explicit Epilogue(const Warpgroup<config>& warpgroup)
      : wg(warpgroup), thread(static_cast<unsigned>(ptx::hide_from_compiler(warpgroup.thread))) {}

  __device__ __forceinline__ void finish(const Tile& tile, OutputTile& O, const RowState& rows) const {
    const ScoreMath<config> math(wg.args, tile, tile.q_begin + wg.warpgroup * wg_rows + thread / 32 * 16, thread % 32);
    const bool visited_interior = sees_interior(wg);
    float sum[2] = {rows.sum[0], rows.sum[1]};  // four threads share a row
#pragma unroll
    for (int lanes = 1; lanes <= 2; ++lanes) {
#pragma unroll
      for (int r = 0; r < 2; ++r) sum[r] += ptx::shuffle_xor(sum[r], lanes);
    }
    const float v_scale =
        tile::head_scale<features>(wg.args.V_scale, tile.sequence.batch_idx, tile.head_idx / wg.args.group);
    float factor[2], lse[2], poison[2] = {0, 0};  // becomes NaN if any output of the row is not finite
    bool used[2], counts[2];  // a row that counts sees a key, too
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      used[r] = math.row + 8 * r < math.score.sight.len_q;
      const bool empty =
          rows.max[r] == -tile::infinity && sum[r] == 0.0f && !visited_interior;  // not empty if all scores were NaN
      const float maximum = ScoreMath<config>::finite(rows.max[r]) * math.exponent_scale;  // in powers of 2
      counts[r] = used[r] && !empty;
      float denominator = sum[r];
      lse[r] = counts[r] ? (maximum - top + ptx::log2(sum[r])) * tile::ln_2 : -tile::infinity;
      if constexpr (features.sink) {
        const float sink = wg.args.sink[tile.head_idx];
        denominator += ptx::exp2(sink * tile::log2_e - (maximum - top));
        if (used[r]) lse[r] = tile::lse_with_sink(lse[r], sink);
      }
      factor[r] = counts[r] ? v_scale * ptx::reciprocal(denominator) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < S::width_v / 2; ++i) {
      const int r = i / 2 % 2;
      O[i] *= factor[r];
      poison[r] = ptx::fma(O[i], 0.0f, poison[r]);
      if constexpr (features.seqused_q) O[i] = counts[r] ? O[i] : 0.0f;  // unused rows are 0 even if they hold NaN
    }
    wg.take_sums();  // adds the sums, and waits until the previous store has read the memory
    place(O);
    repair(tile, used, lse, poison, sum);
    store(tile);
    if (wg.args.lse != nullptr && thread % 4 == 0) {
      float* const to = wg.args.lse + tile::statistics_offset<features>(wg.args, tile.sequence, tile.head_idx) + math.row;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (math.row + 8 * r < tile.sequence.rows_q) to[8 * r] = lse[r];
      }
    }
  }

 private:
  /// Writes O in 16 bits to the warpgroup's memory. stmatrix stores 16 x 16 elements: a lane provides the address of row
  /// lane % 16, from column 8 (lane / 16) on.
  __device__ __forceinline__ void place(const OutputTile& O) const {
    const unsigned row = thread / 32 * 16 + thread % 16;
    const unsigned first = row * 128 + (thread / 16 % 2 ^ row % 8) * 16;  // of the first 16 columns
#pragma unroll
    for (int group = 0; group < S::width_v / 16; ++group) {
      auto* to = wg.shared.O[wg.warpgroup] + group / 4 * StoredTile::panel_bytes + (first ^ group % 4 * 32);
      const float* o = O + 8 * group;
      ptx::stmatrix_x4(to, ptx::pack<S::type>(o[0], o[1]), ptx::pack<S::type>(o[2], o[3]), ptx::pack<S::type>(o[4], o[5]),
                       ptx::pack<S::type>(o[6], o[7]));
    }
  }

  /// Repairs the rows of this warp whose output is not finite although their sum is: each row is computed again from
  /// visible keys only.
  __device__ __forceinline__ void repair(const Tile& tile, const bool (&used)[2], const float (&lse)[2],
                                         const float (&poison)[2], const float (&sum)[2]) const {
    bool mine = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) mine = mine || (used[r] && poison[r] != 0.0f && sum[r] < tile::infinity);
    if (!ptx::any(mine)) return;
    ptx::path<"forward/sm90_fp8 repaired row">();
    __syncwarp();  // all lanes have written
    const int first_row = static_cast<int>(thread / 32 * 16);
#pragma unroll 1
    for (int row = 0; row < 16; ++row) {
      const int r = row / 8;
      bool nonfinite = false;
#pragma unroll 1
      for (int part = 0; part < 4; ++part) {
        const int lane = row % 8 * 4 + part;
        const bool of_lane = r == 0 ? used[0] && poison[0] != 0.0f && sum[0] < tile::infinity
                                    : used[1] && poison[1] != 0.0f && sum[1] < tile::infinity;
        nonfinite = nonfinite || ptx::shuffle(of_lane ? 1 : 0, lane) != 0;
      }
      const float row_lse = ptx::shuffle(r == 0 ? lse[0] : lse[1], row % 8 * 4);
      if (!nonfinite) continue;
      repair_output<config, StoredTile>(wg.args, tile.sequence, tile.head_idx,
                                        tile.q_begin + wg.warpgroup * wg_rows + first_row + row, row_lse,
                                        ptx::shared_address(wg.shared.O[wg.warpgroup]), first_row + row);
    }
  }

  /// Stores O with TMA. The wait is at the next use of the memory.
  __device__ __forceinline__ void store(const Tile& tile) const {
    const int first_row = tile.q_begin + wg.warpgroup * wg_rows;
    const int rows = tile.sequence.rows_q - first_row;
    ptx::fence_async_shared();  // orders the writes before TMA reads
    sync(wg);                   // the whole warpgroup has written
    if (features.packed && rows < wg_rows) {
      ptx::path<"forward/sm90_fp8 end of a packed sequence">();
      copy_rows(tile, rows);  // a box of TMA would overwrite rows of the next sequence
    } else if (thread == 0 && rows > 0) {
#pragma unroll
      for (int c = 0; c < S::o_chunks; ++c) {
        ptx::tma_store_4d(wg.args.maps[map_O], wg.shared.O[wg.warpgroup] + c * StoredTile::panel_bytes, c * o_chunk_dim,
                          static_cast<int>(tile.sequence.start_q) + first_row, tile.head_idx,
                          features.packed ? 0 : tile.sequence.batch_idx);
      }
      ptx::bulk_commit();
    }
  }

  /// Copies rows with ordinary stores of 16 bytes.
  __device__ __forceinline__ void copy_rows(const Tile& tile, int rows) const {
    const auto out = tile::query_rows<typename S::Element, features>(wg.args.O, tile.sequence, tile.head_idx);
    const int first_row = tile.q_begin + wg.warpgroup * wg_rows;
    tile::Rows<typename S::Element> to = out.from(first_row);
    to.count = tile::min(rows, wg_rows);
    tile::store_tile<wg_threads, config.head_dim_v, wg_rows, StoredTile>(ptx::shared_address(wg.shared.O[wg.warpgroup]), 0,
                                                                         to, static_cast<int>(thread));
  }
};

}  // namespace flash_attention::forward_sm90_fp8
