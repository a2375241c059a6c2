#pragma once

// The loop of forward/sm90 in the fixed order of invariant bits: docs/numerics.md. Keys are cut into segments at multiples
// of Shape::segment_blocks blocks, counted from key 0. Each segment has its own running maximum, sum and output; they are
// added to those of the segments before:
//
//     the loop of kv_loop.cuh over all blocks; each raises the maximum
//       at the first block of another segment, when the output of the block before is complete, instead of a rescale:
//       total = total * factor + segment * factor                                       SegmentTotals
//     total, of the last segment, too
//
// So the softmax of the new segment overlaps with the last product of the old one. While a segment is computed, the output
// of those before is in the workspace, in the layout of the registers. A thread reads what it has written itself. With one
// segment, nothing is written.

#include "forward/sm90/kv_loop.cuh"
#include "tile/fixed_order.cuh"
#include "tile/workspace.cuh"

namespace flash_attention::forward_sm90 {

/// A thread's maxima, sums and output over all segments so far, in the workspace: registers are scarce.
template <ForwardConfig config>
struct SegmentTotals {
  using S = Shape<config>;
  using Four = ptx::Vector<float, 4>;
  using OutputTile = typename Warpgroup<config>::OutputTile;
  static constexpr int fours = forward_sm90_total_floats(config.head_dim_v) / 4;  // of a thread; the last: of the rows

  /// Factors of the output so far and of a segment's.
  struct Factors {
    float before[2], segment[2];
  };

  __device__ __forceinline__ static void add_lanes(RowState& rows) {
#pragma unroll
    for (float& sum : rows.sum) sum = tile::reduce_quad(sum, [](float a, float b) { return a + b; });
  }
  /// Adds a segment's maxima and sums: `rows` become the totals. The first one is taken over as it is. There is no branch: a
  /// product is in flight.
  __device__ __forceinline__ static Factors add_rows(const Warpgroup<config>& wg, RowState& rows, float exponent_scale,
                                                     bool is_first) {
    add_lanes(rows);
    Factors factors;
    Four* const place = place_of(wg) + (fours - 1) * wg_threads;
    const Four before = ptx::load_global(place);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      tile::RowTotal total{is_first ? -tile::infinity : before[2 * r], is_first ? 0.0f : before[2 * r + 1]};
      const tile::RowTotal::Factors of_row = total.add(rows.max[r], rows.sum[r], exponent_scale);
      factors.before[r] = of_row.before, factors.segment[r] = of_row.segment;
      rows.max[r] = total.max, rows.sum[r] = total.sum;
    }
    ptx::store_global(place, Four{{rows.max[0], rows.sum[0], rows.max[1], rows.sum[1]}});
    return factors;
  }

  /// Adds a segment that is not the last one. O is only read: in a branch its registers must stay what they are.
  __device__ __forceinline__ static void add(const Warpgroup<config>& wg, const OutputTile& O, RowState& rows,
                                             float exponent_scale, bool is_first) {
    const Factors factors = add_rows(wg, rows, exponent_scale, is_first);
    Four* const place = place_of(wg);
#pragma unroll
    for (int i = 0; i < S::width_v / 2; i += 4) {
      Four sums{};
      if (!is_first) sums = ptx::load_global(place + i / 4 * wg_threads);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        sums[e] = tile::RowTotal::combine(sums[e], O[i + e], {factors.before[e / 2], factors.segment[e / 2]});
      ptx::store_global(place + i / 4 * wg_threads, sums);
    }
  }

  /// Adds the last segment: O and `rows` become the total.
  __device__ __forceinline__ static void finish(const Warpgroup<config>& wg, OutputTile& O, RowState& rows,
                                                float exponent_scale, bool is_first) {
    if (is_first) return add_lanes(rows);
    ptx::path<"forward/sm90 several segments">();
    const Factors factors = add_rows(wg, rows, exponent_scale, false);
    const Four* const place = place_of(wg);
#pragma unroll
    for (int i = 0; i < S::width_v / 2; i += 4) {
      const Four sums = ptx::load_global(place + i / 4 * wg_threads);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        O[i + e] = tile::RowTotal::combine(sums[e], O[i + e], {factors.before[e / 2], factors.segment[e / 2]});
    }
  }

 private:
  __device__ __forceinline__ static Four* place_of(const Warpgroup<config>& wg) {
    const int owner = static_cast<int>(blockIdx.x) * S::warpgroups + wg.warpgroup;
    return tile::workspace<Four>(wg.args, ForwardSm90Region::totals) + owner * (fours * wg_threads) +
           ptx::hide_from_compiler(wg.thread);
  }
};

template <class W>
__device__ __forceinline__ void attend_in_order(TileWork<W>& work, const Tile& tile, const Blocks& seen,
                                                const ScoreMath<W::config>& math) {
  constexpr ForwardConfig config = W::config;
  constexpr int segment = W::S::segment_blocks;
  using Totals = SegmentTotals<config>;
  const int first = tile.first + seen.begin;
  const auto is_in_first = [&](int block) { return block / segment == first / segment; };
  const auto softmax = [&](int block, float(&rescale)[2]) {
    softmax_edge(work.wg, math, block, work.scores, work.out.rows, work.out.statistics, rescale);
    return true;
  };
  skip_blocks(work.wg, seen.begin);
  first_block(work, tile, math, first, after<config>(tile, seen, seen.begin), softmax);
#pragma unroll 1
  for (int n = seen.begin + 1; n < seen.end; ++n) {
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
          if (begins) Totals::add(work.wg, work.out.O, closed, math.exponent_scale, is_in_first(block - 1));
          rescale_output(work.out.O, rescale);  // of a new segment O is not read
          work.accumulate = !begins;
        });
  }
  release_queries(work.wg);
  last_output(work, math, tile.first + seen.end - 1);
  Totals::finish(work.wg, work.out.O, work.out.rows, math.exponent_scale, is_in_first(tile.first + seen.end - 1));
  skip_blocks(work.wg, tile.blocks - seen.end);
}

}  // namespace flash_attention::forward_sm90
