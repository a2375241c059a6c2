#pragma once

// The end of a tile in forward/sm90: divide by the row sums, write lse, store O through shared memory.

#include "forward/sm90/merge.cuh"
#include "forward/sm90/warpgroup.cuh"
#include "ptx/matrix_store.cuh"
#include "ptx/path.cuh"
#include "ptx/tma.cuh"
#include "tile/largest_score.cuh"

namespace flash_attention::forward_sm90 {

template <ForwardConfig config>
struct Epilogue {
  using S = Shape<config>;
  static constexpr Features features = config.features;

  const AttentionArgs& args;
  SharedStorage<config>& shared;
  const int warpgroup;
  const unsigned thread;

  /// Reads the thread index again, so that addresses computed from it do not occupy registers during the main loop.
  __device__ __forceinline__ explicit Epilogue(const Warpgroup<config>& wg)
      : args(wg.args),
        shared(wg.shared),
        warpgroup(wg.warpgroup),
        thread(static_cast<unsigned>(ptx::hide_from_compiler(wg.thread))) {}

  /// Returns whether the next attempt must repeat the tile (see Attempt).
  __device__ __forceinline__ bool finish(const Tile& tile, bool visited_interior, Output<config>& out) const {
    auto& O = out.O;
    auto& rows = out.rows;
    const ScoreMath<config> math(args, tile, tile.q_begin + S::row_group(warpgroup) * wg_rows + thread / 32 * 16,
                                 thread % 32);
    float sum[2] = {rows.sum[0], rows.sum[1]};  // four threads share a row
    if constexpr (!S::ordered) {
#pragma unroll
      for (int lanes = 1; lanes <= 2; ++lanes) {
#pragma unroll
        for (int r = 0; r < 2; ++r) sum[r] += ptx::shuffle_xor(sum[r], lanes);
      }
    }
    bool used[2], empty[2];
    float maximum[2] = {}, factor[2], ordered_lse[2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      used[r] = math.row + 8 * r < math.score.sight.len_q;
      if constexpr (stack > 1) used[r] = used[r] && has_head(math.row + 8 * r);
      if constexpr (S::ordered) {
        const float sink = features.sink ? args.sink[tile.head_idx] : -tile::infinity;
        const float own = tile::finish_total(rows.max[r], sum[r], math.exponent_scale, sink, ordered_lse[r]);
        empty[r] = own == 0, factor[r] = used[r] ? own : 0.0f;
        continue;
      }
      empty[r] = rows.max[r] == -tile::infinity && sum[r] == 0.0f && !visited_interior;  // not empty if all scores were NaN
      maximum[r] = ScoreMath<config>::finite(rows.max[r]) * math.exponent_scale;         // in powers of 2
      float denominator = sum[r];
      if constexpr (features.sink)
        denominator += ptx::exp2(args.sink[head_of(tile, math.row + 8 * r)] * tile::log2_e - maximum[r]);
      const float keep_scale = features.dropout ? args.keep_scale * (1.0f / ScoreMath<config>::P_scale) : 1.0f;
      factor[r] = used[r] && !empty[r] ? keep_scale * ptx::reciprocal(denominator) : 0.0f;
    }

    float poison[2] = {0, 0};  // becomes NaN if any output of the row is not finite
#pragma unroll
    for (int i = 0; i < S::width_v / 2; ++i) {
      const int r = i / 2 % 2;
      const float scaled = O[i] * factor[r];
      poison[r] = ptx::fma(scaled, 0.0f, poison[r]);
      if constexpr (!config.split_keys) O[i] = scaled;
      if constexpr (features.seqused_q) O[i] = used[r] && !empty[r] ? O[i] : 0.0f;  // even if they hold NaN
    }
    const auto write_lse = [&] {
      if constexpr (stack > 1) {
        write_stacked_lse(tile, math, used, empty, maximum, sum);
      } else if (args.lse != nullptr && thread % 4 == 0 && S::first_chunk(warpgroup) == 0) {
        float* const lse = args.lse + tile::statistics_offset<features>(args, tile.sequence, tile.head_idx) + math.row;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (math.row + 8 * r >= tile.sequence.rows_q) continue;
          const float of_row = S::ordered ? ordered_lse[r] : lse_of(tile.head_idx, maximum[r], sum[r], empty[r]);
          lse[8 * r] = used[r] ? of_row : -tile::infinity;
        }
      }
      if constexpr (features.entropy) write_entropy(tile, math, used, empty, maximum, sum, out.statistics);
    };
    if constexpr (config.split_keys) {
      store_part(tile, out, sum, empty, factor);
    } else {
      store(tile, O, write_lse);
    }

    bool retry = false;
    [[maybe_unused]] float largest_score = -tile::infinity;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool sound = S::ordered ? !S::keeps_reference || sum[r] < tile::infinity  // SegmentTotals
                         : empty[r] || (sum[r] >= 0.5f && sum[r] < highest_sum && !math.is_large(maximum[r]));
      const bool finite_sum = sum[r] < tile::infinity;  // if not, a score was NaN, and the row is rightly NaN
      const bool again = used[r] && ((tile.attempt == Attempt::fixed_max && !sound) ||
                                     (tile.attempt != Attempt::nonfinite_safe && finite_sum && poison[r] != 0.0f));
      retry = retry || again;
      // A row that is repeated may have the NaN of an overflow.
      if constexpr (features.max_logit) {
        const float row = tile::reduce_quad(out.statistics.largest[r], [](float a, float b) { return ptx::max(a, b); });
        const float score = sum[r] != sum[r] ? sum[r] : row * math.score.unit_scale();
        if (used[r] && !empty[r] && !again) largest_score = tile::larger_or_nan(score, largest_score);
      }
    }
    if constexpr (features.max_logit) {
      tile::raise_largest_of_warp(args, tile.sequence.batch_idx, tile.head_idx, static_cast<int>(thread % 32),
                                  largest_score);
    }
    return retry;
  }

  __device__ __forceinline__ float lse_of(int head_idx, float maximum, float sum, bool empty) const {
    const float lse = empty ? -tile::infinity : (maximum + ptx::log2(sum)) * tile::ln_2;
    if constexpr (!features.sink) return lse;
    return tile::lse_with_sink(lse, args.sink[head_idx]);
  }

  // If heads are stacked, row r of a tile is of head r % stack of its group; rows past the group are of none.
  static constexpr int stack = tile::rows_of_query<features>;
  __device__ __forceinline__ bool has_head(int row) const { return tile::has_head<features>(args, row); }
  __device__ __forceinline__ int head_of(const Tile& tile, int row) const {
    return stack == 1 ? tile.head_idx
                      : tile.head_idx * args.stacked_group + tile::min(row % stack, args.stacked_group - 1);
  }

  __device__ __forceinline__ void write_stacked_lse(const Tile& tile, const ScoreMath<config>& math, const bool (&used)[2],
                                                    const bool (&empty)[2], const float (&maximum)[2],
                                                    const float (&sum)[2]) const {
    if (args.lse == nullptr || thread % 4 != 0) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = math.row + 8 * r, head_idx = head_of(tile, row);
      if (row >= tile.sequence.rows_q || !has_head(row)) continue;
      args.lse[tile::statistics_offset<features>(args, tile.sequence, tile.head_idx) +
               tile::statistic_of<features>(args, row)] =
          used[r] ? lse_of(head_idx, maximum[r], sum[r], empty[r]) : -tile::infinity;
    }
  }

  __device__ __forceinline__ void write_entropy(const Tile& tile, const ScoreMath<config>& math, const bool (&used)[2],
                                                const bool (&empty)[2], const float (&maximum)[2], const float (&sum)[2],
                                                const typename ScoreMath<config>::Statistics& statistics) const {
    float* const entropy = args.entropy + tile::statistics_offset<features>(args, tile.sequence, tile.head_idx) + math.row;
    float sink = -tile::infinity;
    if constexpr (features.sink) sink = args.sink[tile.head_idx];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float moment = tile::reduce_quad(statistics.moment[r], [](float a, float b) { return a + b; });
      if (thread % 4 != 0 || math.row + 8 * r >= tile.sequence.rows_q) continue;
      entropy[8 * r] = used[r] && !empty[r] ? tile::row_entropy(maximum[r], sum[r], moment, sink) : 0;
    }
  }

  /// If the row sum is below this limit, no probability of the row exceeds the range of P's type. If P is scaled (P_scale),
  /// an overflow makes O infinite instead, and is detected there.
  static constexpr float highest_sum =
      S::type == Type::float16 && ScoreMath<config>::P_scale == 1.0f ? 65504.0f : 1099511627776.0f;  // the largest, 2^40

  /// Writes O in 16 bits to the warpgroup's buffer and stores it with TMA. It waits for the store only when the buffer is
  /// needed again. If the buffer holds half of O, that is at once; meanwhile() runs in that gap.
  template <typename Meanwhile>
  __device__ __forceinline__ void store(const Tile& tile, const float (&O)[S::width_v / 2],
                                        const Meanwhile& meanwhile) const {
    const int first_row = tile.q_begin + S::row_group(warpgroup) * wg_rows;
    const int first_chunk = S::first_chunk(warpgroup);
    const int rows = tile.sequence.rows_q - first_row;
    // stmatrix stores 16 x 16 elements: a lane provides the address of row lane % 16, from column 8 (lane / 16) on.
    const unsigned row = thread / 32 * 16 + thread % 16;
    const unsigned place = row * 128 + (thread / 16 % 2 ^ row % 8) * 16;  // of the first 16 columns
#pragma unroll
    for (int begin = 0; begin < S::chunks_v; begin += S::o_chunks) {
      if (begin != 0) ptx::path<"forward/sm90 second half of O">();
      if (thread == 0) ptx::bulk_wait_read<0>();                     // the store before this one has read the buffer
      ptx::barrier_sync(barrier_warpgroup + warpgroup, wg_threads);  // so all may write it
#pragma unroll
      for (int group = begin * 4; group < tile::min((begin + S::o_chunks) * 4, S::width_v / 16); ++group) {
        auto* to = reinterpret_cast<unsigned char*>(shared.O[warpgroup][group / 4 - begin]) + (place ^ group % 4 * 32);
        const float* o = O + 8 * group;
        ptx::stmatrix_x4(to, ptx::pack<S::type>(o[0], o[1]), ptx::pack<S::type>(o[2], o[3]), ptx::pack<S::type>(o[4], o[5]),
                         ptx::pack<S::type>(o[6], o[7]));
      }
      ptx::fence_async_shared();                                     // the writes are visible to TMA
      ptx::barrier_sync(barrier_warpgroup + warpgroup, wg_threads);  // the whole warpgroup has written
      if (features.packed && rows < wg_rows) {
        ptx::path<"forward/sm90 end of a packed sequence">();
        copy_rows(tile, begin, rows);  // a box of TMA would overwrite rows of the next sequence
      } else if (thread == 0 && rows > 0) {
#pragma unroll
        for (int c = begin; c < tile::min(begin + S::o_chunks, S::chunks_v); ++c) {
          if (S::wide && (first_chunk + c) * chunk_dim >= config.head_dim_v) continue;
          if constexpr (stack > 1) {
            ptx::tma_store_5d(args.maps[map_O], shared.O[warpgroup][c - begin], c * chunk_dim, 0, tile.head_idx,
                              first_row / stack, tile.sequence.batch_idx);
            continue;
          }
          ptx::tma_store_4d(args.maps[map_O], shared.O[warpgroup][c - begin], (first_chunk + c) * chunk_dim,
                            static_cast<int>(tile.sequence.start_q) + first_row, tile.head_idx,
                            features.packed ? 0 : tile.sequence.batch_idx);
        }
        ptx::bulk_commit();
      }
      if (begin == 0) meanwhile();
    }
  }

  /// Stores this part of the rows, normalised by their sums and in the layout of the registers; then the sums and their
  /// references. It uses stmatrix, which can also move 32-bit words: with other stores the accumulators spill.
  __device__ __forceinline__ void store_part(const Tile& tile, const Output<config>& out, const float (&sum)[2],
                                             const bool (&empty)[2], const float (&factor)[2]) const {
    const SplitParts<config> parts(args);
    const int head_of_batch = tile.sequence.batch_idx * args.heads_q + tile.head_idx;
    const int first_row = tile.q_begin + warpgroup * wg_rows;
    constexpr int registers = 16 * S::o_chunks;  // of a thread, that fit in the buffer
    auto* const buffer = reinterpret_cast<unsigned char*>(shared.O[warpgroup]);
#pragma unroll
    for (int begin = 0; begin < S::width_v / 2; begin += registers) {
      const int count = tile::min(registers, S::width_v / 2 - begin);
      if (thread == 0) ptx::bulk_wait_read<0>();                     // the store before this one has read the buffer
      ptx::barrier_sync(barrier_warpgroup + warpgroup, wg_threads);  // so all may write it
#pragma unroll
      for (int i = 0; i < count; i += 4) {
        const auto word = [&](int n) {
          return __builtin_bit_cast(unsigned, out.O[begin + i + n] * factor[(begin + i + n) / 2 % 2]);
        };
        ptx::stmatrix_x4(buffer + i * 512 + thread * 16, word(0), word(1), word(2), word(3));
      }
      ptx::fence_async_shared();                                     // what was written, before the copy reads it
      ptx::barrier_sync(barrier_warpgroup + warpgroup, wg_threads);  // the whole warpgroup has written
      if (thread == 0) {
        ptx::bulk_store(parts.rows_at(tile.split, head_of_batch, first_row) + begin * wg_threads, buffer, count * 512);
        ptx::bulk_commit();
      }
    }
    if (thread % 4 != 0) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + static_cast<int>(thread / 32 * 16 + thread % 32 / 4) + 8 * r;
      const float reference = empty[r] ? -tile::infinity : ScoreMath<config>::finite(out.rows.max[r]);
      if (row < tile.sequence.rows_q)
        ptx::store_global(parts.statistics_at(tile.split, head_of_batch, row), {{reference, sum[r]}});
    }
  }

  /// Copies rows of the buffer to global memory with ordinary stores of 16 bytes.
  __device__ __forceinline__ void copy_rows(const Tile& tile, int chunk_begin, int rows) const {
    using Element = typename S::Element;
    constexpr int pieces = S::o_chunks * 8;  // of a row
    const tile::Rows<Element> out = tile::query_rows<Element, features>(args.O, tile.sequence, tile.head_idx);
    for (int i = thread; i < rows * pieces; i += wg_threads) {
      const int row = i / pieces, piece = i - row * pieces;
      const int column = (S::first_chunk(warpgroup) + chunk_begin) * chunk_dim + piece * 8;
      if (column >= config.head_dim_v || (S::wide && chunk_begin + piece / 8 >= S::chunks_v)) continue;
      const unsigned from = ptx::shared_address(shared.O[warpgroup][piece / 8]) + row * 128 + (piece % 8 ^ row % 8) * 16;
      const auto value = ptx::load_shared<ptx::Vector<unsigned, 4>>(from);
      Element* to = out.data + (tile.q_begin + S::row_group(warpgroup) * wg_rows + row) * out.stride + column;
      ptx::store_global(reinterpret_cast<ptx::Vector<unsigned, 4>*>(to), value);
    }
  }
};

}  // namespace flash_attention::forward_sm90
