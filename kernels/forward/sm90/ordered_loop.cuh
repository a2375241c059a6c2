#pragma once

// The loop of forward/sm90 in the fixed order of invariant bits: docs/numerics.md. Keys are cut into segments at multiples
// of Shape::segment_blocks blocks, counted from key 0. Each segment has its own reference, sum and output; they are added to
// those of the segments before:
//
//     the loop of kv_loop.cuh over all blocks
//       at the first block of another segment, when the output of the block before is complete, instead of a rescale:
//       total = total * factor + segment * factor                                       SegmentTotals
//     total, of the last segment, too
//
// Only edge blocks give a row its reference, and raise it where the order says so. Interior blocks keep it
// (Attempt::fixed_max). If that was wrong for a row, the sum of the segment tells, and the tile is repeated with nothing but
// edge blocks (Attempt::online_max). Both attempts have the same bits in all other rows.
//
// So the softmax of the new segment overlaps with the last product of the old one. While a segment is computed, the output
// of those before is in shared memory, or in the workspace if that has no room. A thread reads what it has written itself.
// With one segment, nothing is written.

#include "forward/sm90/kv_loop.cuh"
#include "tile/fixed_order.cuh"
#include "tile/workspace.cuh"

namespace flash_attention::forward_sm90 {

/// A thread's references, sums and output over all segments so far, in the layout of its registers, which are scarce: in
/// shared memory, from that of O on, or in the workspace.
template <ForwardConfig config>
struct SegmentTotals {
  using S = Shape<config>;
  using Four = ptx::Vector<float, 4>;
  using Pair = ptx::Vector<float, 2>;
  using OutputTile = typename Warpgroup<config>::OutputTile;
  static constexpr bool shared = S::totals_bytes > 0;
  static constexpr int count = S::width_v / 8;                    // of a thread, in fours
  static constexpr int in_O = S::o_chunks * 4;                    // fours in the memory of O
  static constexpr int batch = S::width_v > 128 ? 4 : 8;          // fours that are loaded together
  static constexpr int row_place = S::totals_bytes / S::warpgroups - wg_rows * 8;  // in shared.totals

  const Warpgroup<config>& wg;
  const float exponent_scale;

  /// Adds a segment that is not the last one. O is only read: in a branch its registers must stay what they are.
  __device__ __forceinline__ void add(const OutputTile& O, RowState& rows, bool is_first) const {
    if (shared && is_first) {
      if (wg.thread == 0) ptx::bulk_wait_read<0>();  // the store of the tile before has read O
      sync(wg);                                      // so all may write there
    }
    const Factors factors = add_rows(rows, is_first);
#pragma unroll
    for (int first = 0; first < count; first += batch) {
      Four sums[batch] = {};
      if (!is_first) load(first, sums);
#pragma unroll
      for (int n = 0; n < tile::min(batch, count - first); ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[n][e] = factors.combine(sums[n][e], O[4 * (first + n) + e], e / 2);
        store(first + n, sums[n]);
      }
    }
  }

  /// Adds the last segment: O and `rows` become the total.
  __device__ __forceinline__ void finish(OutputTile& O, RowState& rows, bool is_first) const {
    if (is_first) return add_lanes(rows);
    ptx::path<"forward/sm90 several segments">();
    const Factors factors = add_rows(rows, false);
#pragma unroll
    for (int first = 0; first < count; first += batch) {
      Four sums[batch] = {};
      load(first, sums);
#pragma unroll
      for (int n = 0; n < tile::min(batch, count - first); ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) O[4 * (first + n) + e] = factors.combine(sums[n][e], O[4 * (first + n) + e], e / 2);
      }
    }
  }

 private:
  /// Factors of the output so far and of a segment's, by row.
  struct Factors {
    tile::RowTotal::Factors of_row[2];
    __device__ __forceinline__ float combine(float before, float segment, int row) const {
      return tile::RowTotal::combine(before, segment, of_row[row]);
    }
  };

  /// The rows' sums. One that is too large for its reference, or has none, becomes infinite, for the epilogue.
  __device__ __forceinline__ void add_lanes(RowState& rows) const {
    const bool kept = S::keeps_reference && attempt_of(wg) == Attempt::fixed_max;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = tile::reduce_quad(rows.sum[r], [](float a, float b) { return a + b; });
      const bool sound = sum <= tile::largest_sum<S::type> && (rows.max[r] != -tile::infinity || sum == 0);
      rows.sum[r] = kept && !sound ? tile::infinity : sum;
    }
  }

  /// Adds a segment's references and sums: `rows` become the totals. The first one is taken over as it is.
  __device__ __forceinline__ Factors add_rows(RowState& rows, bool is_first) const {
    add_lanes(rows);
    Factors factors;
    const Four before = load_rows();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      tile::RowTotal total{is_first ? -tile::infinity : before[2 * r], is_first ? 0.0f : before[2 * r + 1]};
      factors.of_row[r] = total.add(rows.max[r], rows.sum[r], exponent_scale);
      rows.max[r] = total.max, rows.sum[r] = total.sum;
    }
    store_rows({{rows.max[0], rows.sum[0], rows.max[1], rows.sum[1]}});
    return factors;
  }

  __device__ __forceinline__ int thread() const { return ptx::hide_from_compiler(wg.thread); }
  /// In the workspace: the thread's fours, then one of its rows.
  __device__ __forceinline__ Four* global(int n) const {
    const int owner = static_cast<int>(blockIdx.x) * S::warpgroups + wg.warpgroup;
    return tile::workspace<Four>(wg.args, ForwardSm90Region::totals) + owner * ((count + 1) * wg_threads) + n * wg_threads +
           thread();
  }
  __device__ __forceinline__ unsigned of_shared(int n) const {
    const unsigned begin = n < in_O ? ptx::shared_address(wg.shared.O[wg.warpgroup])
                                    : ptx::shared_address(wg.shared.totals.of[wg.warpgroup]) - in_O * 16 * wg_threads;
    return begin + static_cast<unsigned>((n * wg_threads + thread()) * 16);
  }
  /// All loads of a batch are in flight together.
  __device__ __forceinline__ void load(int first, Four (&sums)[batch]) const {
#pragma unroll
    for (int n = 0; n < tile::min(batch, count - first); ++n) {
      if constexpr (shared) {
        sums[n] = ptx::load_shared<Four>(of_shared(first + n));
      } else {
        sums[n] = ptx::load_global(global(first + n));
      }
    }
  }
  __device__ __forceinline__ void store(int n, const Four& sums) const {
    if constexpr (shared) {
      ptx::store_shared(of_shared(n), sums);
    } else {
      ptx::store_global(global(n), sums);
    }
  }
  /// In shared memory: maximum and sum of this lane's first row. Four lanes share it.
  __device__ __forceinline__ unsigned of_rows() const {
    const int t = thread();
    return ptx::shared_address(wg.shared.totals.of[wg.warpgroup]) +
           static_cast<unsigned>(row_place + (t / 32 * 16 + t % 32 / 4) * 8);
  }
  __device__ __forceinline__ Four load_rows() const {
    if constexpr (!shared) {
      return ptx::load_global(global(count));
    } else {
      const auto low = ptx::load_shared<Pair>(of_rows()), high = ptx::load_shared<Pair>(of_rows() + 64);
      return {{low[0], low[1], high[0], high[1]}};
    }
  }
  __device__ __forceinline__ void store_rows(const Four& rows) const {
    if constexpr (!shared) {
      ptx::store_global(global(count), rows);
    } else {
      __syncwarp();  // the other lanes have read
      if (thread() % 4 == 0) {
        ptx::store_shared(of_rows(), Pair{{rows[0], rows[1]}});
        ptx::store_shared(of_rows() + 64, Pair{{rows[2], rows[3]}});
      }
      __syncwarp();  // the other lanes may read
    }
  }
};

template <class W>
__device__ __forceinline__ void attend_in_order(TileWork<W>& work, const Tile& tile, const Blocks& seen,
                                                const ScoreMath<W::config>& math) {
  using S = typename W::S;
  constexpr ForwardConfig config = W::config;
  constexpr int segment = S::segment_blocks;
  const SegmentTotals<config> totals{work.wg, math.exponent_scale};
  const int first = tile.first + seen.begin;
  const auto is_in_first = [&](int block) { return block / segment == first / segment; };
  const auto softmax = [&](int block, float(&rescale)[2]) {
    softmax_edge(work.wg, math, block, work.scores, work.out.rows, work.out.statistics, rescale);
    return true;
  };
  skip_blocks(work.wg, seen.begin);
  first_block(work, tile, math, first, after<config>(tile, seen, seen.begin), softmax);
  if constexpr (S::releases_early) release_queries(work.wg);  // a barrier has followed the reading of Q
  int n = seen.begin + 1;
#pragma unroll 1
  while (n < seen.end) {
    const int end = tile::min(seen.end, n + segment - (tile.first + n) % segment);  // of the segment
    const int edges = tile::min(end, tile::max(seen.interior_begin, n + ((tile.first + n) % segment == 0 ? 1 : 0)));
#pragma unroll 1
    for (; n < edges; ++n) {
      const bool begins = ptx::any((tile.first + n) % segment == 0);  // a vote: the compiler knows that lanes stay together
      RowState closed;
      next_block<Visit::edge>(
          work, tile, math, tile.first + n, after<config>(tile, seen, n),
          [&](int block, float(&rescale)[2]) {  // no branch: a product is in flight
            closed = work.out.rows;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              work.out.rows.max[r] = begins ? -tile::infinity : work.out.rows.max[r];
              work.out.rows.sum[r] = begins ? 0.0f : work.out.rows.sum[r];
            }
            return softmax(block, rescale);
          },
          [&](int block, const float(&rescale)[2]) {
            if (begins) totals.add(work.out.O, closed, is_in_first(block - 1));
            rescale_output(work.out.O, rescale);  // of a new segment O is not read
            work.accumulate = !begins;
          });
    }
    if constexpr (S::keeps_reference) {
#pragma unroll 1
      for (; n < tile::min(end, seen.interior_end); ++n)
        visit<Visit::interior>(work, tile, math, tile.first + n, after<config>(tile, seen, n));
#pragma unroll 1
      for (; n < end; ++n) visit<Visit::late_edge>(work, tile, math, tile.first + n, after<config>(tile, seen, n));
    }
  }
  if constexpr (!S::releases_early) release_queries(work.wg);
  last_output(work, math, tile.first + seen.end - 1);
  totals.finish(work.out.O, work.out.rows, is_in_first(tile.first + seen.end - 1));
  skip_blocks(work.wg, tile.blocks - seen.end);
}

}  // namespace flash_attention::forward_sm90
