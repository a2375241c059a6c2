#pragma once

// What a warpgroup of forward/sm90 does with wide heads besides softmax: its half of the scores, P for both warpgroups, its
// half of the output. K and V come in one ring of stages, each of which both warpgroups read:
//
//     K: 64 columns of 128 keys, of which each warpgroup has 64        V: all columns of some keys; each has half of them

#include "forward/sm90/kv_loop.cuh"
#include "forward/sm90/nonfinite_loop.cuh"
#include "ptx/cluster.cuh"
#include "ptx/matrix_store.cuh"
#include "ptx/path.cuh"
#include "ptx/tma.cuh"

namespace flash_attention::forward_sm90 {

/// The other warpgroup's numbers of the same rows, in the place of this one's. They are here and there alternately: who
/// writes a place again has met the other since it read.
template <ForwardConfig config>
__device__ __forceinline__ void exchange(Warpgroup<config>& wg, float (&of_rows)[2]) {
  auto& place = wg.shared.exchanged[wg.place.num_exchanges++ % 2];
  const int thread = ptx::hide_from_compiler(wg.thread), row = thread / 32 * 16 + thread % 32 / 4;
  if (thread % 4 == 0) {
#pragma unroll
    for (int r = 0; r < 2; ++r) place[wg.warpgroup][row + 8 * r] = of_rows[r];
  }
  ptx::barrier_sync(barrier_attend, 2 * wg_threads);  // both have written
#pragma unroll
  for (int r = 0; r < 2; ++r) of_rows[r] = place[1 - wg.warpgroup][row + 8 * r];
}

/// Row sums are those of a warpgroup's keys: one of the four threads of a row adds the other's.
template <ForwardConfig config>
__device__ __forceinline__ void add_other_sums(Warpgroup<config>& wg, RowState& rows) {
  float sum[2] = {rows.sum[0], rows.sum[1]};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sum[r] += ptx::shuffle_xor(sum[r], 1);
    sum[r] += ptx::shuffle_xor(sum[r], 2);
  }
  exchange(wg, sum);
#pragma unroll
  for (int r = 0; r < 2; ++r) rows.sum[r] += wg.thread % 4 == 0 ? sum[r] : 0.0f;
}

template <ForwardConfig config>
struct WideProducts {
  using S = Shape<config>;
  using ScoreTile = typename Warpgroup<config>::ScoreTile;
  using PackedTile = typename Warpgroup<config>::PackedTile;
  using OutputTile = typename Warpgroup<config>::OutputTile;
  using Descriptor = typename Warpgroup<config>::Descriptor;
  static constexpr int value_stages = S::block_kv / S::value_rows;  // of a block

  Warpgroup<config>& wg;

  /// The next stage has landed.
  __device__ __forceinline__ int wait_for_stage() const {
    auto& next = wg.place.next;
    const int stage = next.stage;
    ptx::mbarrier_wait(wg.shared.KV_full[stage], next.phase);
    next.advance();
    return stage;
  }
  /// The products that read the oldest stages are complete.
  __device__ __forceinline__ void release_stages(int count) const {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      release(wg, wg.shared.KV_empty[wg.place.oldest]);
      if (S::cluster > 1 && wg.thread == 0)
        ptx::cluster_mbarrier_arrive_read(
            ptx::cluster_address(&wg.shared.KV_empty[wg.place.oldest], ptx::cluster_rank() ^ 1));
      wg.place.oldest = wg.place.oldest + 1 == S::stages ? 0 : wg.place.oldest + 1;
    }
  }

  /// Issues 64 columns of scores = Q K^T, a group of products.
  __device__ __forceinline__ void issue_chunk(ScoreTile& scores, int chunk, int stage) const {
    const Descriptor Q(ptx::wgmma_descriptor(wg.shared.Q[0][0], 0, 1024));
    const Descriptor K(ptx::wgmma_descriptor(wg.shared.KV[stage], 0, 1024));
    const int columns = chunk == S::chunks - 1 ? S::steps_qk - 4 * (S::chunks - 1) : 4;
    ptx::wgmma_fence();  // softmax is done with these registers
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      if (step >= columns) break;
      ptx::wgmma_ss<S::type, S::score_keys, ptx::Major::k, ptx::Major::k>(
          scores, Q.at(chunk * wg_rows * 128 + step * 32), K.at(wg.warpgroup * S::score_keys * 128 + step * 32),
          chunk + step != 0);
    }
    ptx::wgmma_commit();
  }
  /// The chunks after the first; each is waited for when the next one is issued. One stage is not given back.
  __device__ __forceinline__ void issue_other_chunks(ScoreTile& scores) const {
#pragma unroll 1
    for (int chunk = 1; chunk < S::chunks; ++chunk) {
      issue_chunk(scores, chunk, wait_for_stage());
      ptx::wgmma_wait<1>();  // the chunk before
      release_stages(1);
    }
  }

  /// Before a tile's first P, O of the last tile must have left its place.
  __device__ __forceinline__ void begin_P() const {
    if (wg.thread == 0) {
      ptx::bulk_wait_read<0>();
      ptx::mbarrier_arrive(wg.shared.P_empty);
    }
    ptx::mbarrier_wait(wg.shared.P_empty, wg.place.num_tiles++ % 2);
  }
  /// 16 keys of P to shared memory, where both warpgroups read it. There are two places in turn: who has seen P of the
  /// block before knows that both are done with the one before that.
  __device__ __forceinline__ void store_P(int step, const unsigned (&of_step)[4]) const {
    const auto thread = static_cast<unsigned>(ptx::hide_from_compiler(wg.thread));
    const unsigned row = thread / 32 * 16 + thread % 16;
    const unsigned place = row * 128 + (thread / 16 % 2 ^ row % 8) * 16;
    auto* to = reinterpret_cast<unsigned char*>(wg.shared.O[wg.place.num_published % 2][wg.warpgroup]);
    ptx::stmatrix_x4(to + (place ^ step * 32), of_step[0], of_step[1], of_step[2], of_step[3]);
  }
  /// This warpgroup's part of P is complete, and so are its products with the last one.
  __device__ __forceinline__ void publish_P() const {
    ptx::fence_async_shared();  // P before the products' reads
    __syncwarp();               // that of the whole warp
    if (ptx::hide_from_compiler(wg.thread) % 32 == 0) ptx::mbarrier_arrive(wg.shared.P_full);
    ++wg.place.num_published;
  }
  __device__ __forceinline__ void wait_for_P() const {
    ptx::mbarrier_wait(wg.shared.P_full, (wg.place.num_published - 1) % 2);  // that of all warps is complete
  }

  /// Issues O += P V, or O = P V. Each stage is given back as soon as the next one is issued: what is in flight from L2
  /// bounds this kernel. One stage of V is not given back; one of K is, where scores were issued before.
  /// meanwhile(n) is called when stage n has been issued, from the second on: the scores are complete then.
  template <bool after_scores, typename Meanwhile>
  __device__ __forceinline__ void issue_output(OutputTile& O, int kv_begin, bool accumulate, const ScoreMath<config>& math,
                                               const Meanwhile& meanwhile) const {
#pragma unroll  // else the compiler could not count what is in flight
    for (int n = 0; n < value_stages; ++n) {
      issue_stage(O, n, next_values(n, kv_begin, math), accumulate || n != 0);
      if (n > 0) meanwhile(n);
      ptx::wgmma_wait<1>();  // what was issued before
      if (after_scores || n > 0) release_stages(1);
    }
  }

  /// O += P V where V may hold what is not finite: rows get that only where they see it.
  __device__ __forceinline__ void add_safely(OutputTile& O, int kv_begin, const Tile& tile,
                                             const ScoreMath<config>& math) const {
#pragma unroll 1
    for (int n = 0; n < value_stages; ++n) {
      auto* const V = next_values(n, kv_begin, math);
      add_nonfinite<S::value_rows>(wg, O, ptx::shared_address(V), kv_begin + n * S::value_rows, tile, math);
      clear_all_nonfinite(V);
      issue_stage(O, n, V, true);
      ptx::wgmma_wait<0>();  // O is ours again
      ptx::wgmma_pin(O);
      release_stages(1);
    }
  }

 private:
  /// The next stage of V has landed: where this warpgroup's columns begin.
  __device__ __forceinline__ typename S::Element* next_values(int n, int kv_begin, const ScoreMath<config>& math) const {
    const int stage = wait_for_stage();
    auto* const V = wg.shared.KV[stage] + wg.warpgroup * S::chunks_v * S::value_rows * chunk_dim;
    clear_hidden(V, math.score.visible_kv - kv_begin - n * S::value_rows);
    return V;
  }

  /// The products of the n-th stage of V.
  __device__ __forceinline__ void issue_stage(OutputTile& O, int n, const typename S::Element* values,
                                              bool accumulate) const {
    const Descriptor P(ptx::wgmma_descriptor(wg.shared.O[(wg.place.num_published - 1) % 2], 0, 1024));
    const Descriptor V(ptx::wgmma_descriptor(values, S::value_rows * 128, 1024));
    ptx::wgmma_fence();  // O has been written by ordinary instructions
#pragma unroll
    for (int step = 0; step < S::value_rows / 16; ++step) {
      const int key = n * S::value_rows + step * 16;  // P has a chunk for each 64
      ptx::wgmma_ss<S::type, S::width_v, ptx::Major::k, ptx::Major::mn>(O, P.at(key / 64 * wg_rows * 128 + key % 64 * 2),
                                                                        V.at(step * 16 * 128), accumulate || step != 0);
    }
    ptx::wgmma_commit();
  }

  /// Rows of V behind the visible keys may hold NaN, which a probability of 0 does not silence.
  __device__ __forceinline__ void clear_hidden(typename S::Element* V, int visible_rows) const {
    if constexpr (S::hidden_rows) {
      if (visible_rows >= S::value_rows) return;
      ptx::path<"forward/sm90 wide hidden rows of V">();
      const int first = tile::max(visible_rows, 0), pieces = (S::value_rows - first) * 8;  // of 16 bytes, in each chunk
      for (int i = wg.thread; i < pieces * S::chunks_v; i += wg_threads) {
        const int chunk = i / pieces, piece = i - chunk * pieces;
        ptx::store_shared(ptx::shared_address(V) + (chunk * S::value_rows + first) * 128 + piece * 16,
                          ptx::Vector<unsigned, 4>{});
      }
      sync_writes();
    }
  }
  /// What is not finite in this warpgroup's columns becomes 0.
  __device__ __forceinline__ void clear_all_nonfinite(typename S::Element* V) const {
    ptx::barrier_sync(barrier_warpgroup + wg.warpgroup, wg_threads);  // all have seen V as it came
#pragma unroll 1
    for (int i = wg.thread; i < S::value_rows * S::chunks_v * 32; i += wg_threads) {
      const unsigned address = ptx::shared_address(V) + 4 * i;
      if (has_nonfinite<S::type>(ptx::load_shared<unsigned>(address))) ptx::store_shared(address, 0u);
    }
    sync_writes();
  }
  __device__ __forceinline__ void sync_writes() const {
    ptx::fence_async_shared();                                        // the zeros before the products' reads
    ptx::barrier_sync(barrier_warpgroup + wg.warpgroup, wg_threads);  // those of the whole warpgroup
  }
};

// forward/sm90 with head dimensions above 256. O of 64 rows is too wide for one warpgroup's registers, so two have the same
// rows, and each has half of O's columns. Of a block of 128 keys each has the scores of 64, so no score is computed twice;
// P goes through shared memory, where the products of both read it.
//
//     S = Q K(first)^T of my keys; P = softmax(S) to shared memory
//     for the other blocks:
//       issue S = Q K^T, by chunks of 64 columns; wait for the other's P of the block before
//       issue O += P V of the block before, by stages of keys; between them, softmax of S to the other place of P
//     O += P V(last)
//
// An edge block raises the maximum that both use: they tell each other theirs. An interior block keeps it as a reference
// (kv_loop.cuh), and there is nothing to tell. Row sums are of a warpgroup's own keys until the end of the tile.

template <ForwardConfig config, bool safe>
struct WideLoop {
  using S = Shape<config>;

  Warpgroup<config>& wg;
  Output<config>& out;
  WideProducts<config> products{wg};
  typename Warpgroup<config>::ScoreTile scores;
  float rescale[2];                          // of O, by the block of the scores
  bool accumulate = false;                   // O holds something of the tile
  bool visited_interior = false;             // if masks choose: some block was full
  typename Warpgroup<config>::SeenBlock at;  // if masks choose: the block of the scores
  int in_P = 0;                              // the block that is in P

  __device__ __forceinline__ void run() {
    const Tile tile = tile_of(wg);
    const Blocks seen = blocks_of(wg);
    const ScoreMath<config> math = score_math(wg, tile);
    if constexpr (safe) {
#pragma unroll
      for (float& x : out.O) x = 0;
      accumulate = true;
    }
    begin(tile, math, block_at<config>(tile, 0));
    if constexpr (S::listed) {
#pragma unroll 1
      while (!at.is_last()) visit<Visit::listed>(tile, math, 0);
    } else {
      int n = 1;
#pragma unroll 1
      for (; n < seen.interior_begin; ++n) visit<Visit::edge>(tile, math, block_at<config>(tile, n));
      if constexpr (!config.features.mask && !safe) {
#pragma unroll 1
        for (; n < seen.interior_end; ++n) visit<Visit::interior>(tile, math, block_at<config>(tile, n));
        if constexpr (S::forwards || config.features.window_left) {
#pragma unroll 1
          for (; n < seen.end; ++n) visit<Visit::late_edge>(tile, math, block_at<config>(tile, n));
        }
      }
    }
    release_queries(wg);
    end(tile, math);
  }

 private:
  /// The first key of this warpgroup's scores of a block.
  __device__ __forceinline__ int key_of(int block) const { return block * S::block_kv + wg.warpgroup * S::score_keys; }

  /// The first block: its scores and its softmax.
  __device__ __forceinline__ void begin(const Tile& tile, const ScoreMath<config>& math, int block) {
    block = issue_first_chunk(block);
    products.issue_other_chunks(scores);
    finish_scores();
    softmax_edge(math, block, at.tested());
    visited_interior = S::listed && !at.tested();
    math.drop(scores, math.draw(wg.args, tile, key_of(block)));
    products.begin_P();
    keep(math, block);
  }

  /// One block: its scores, the output of the block before, its softmax.
  template <Visit kind>
  __device__ __forceinline__ void visit(const Tile& tile, const ScoreMath<config>& math, int block) {
    block = issue_first_chunk(block);
    products.issue_other_chunks(scores);
    products.wait_for_P();
    const auto draw = math.draw(wg.args, tile, key_of(block));
    constexpr bool by_parts = kind == Visit::interior && !config.features.touches_scores() && !safe;
    if constexpr (safe) {
      finish_scores();
      products.add_safely(out.O, in_P * S::block_kv, tile, math);
    } else if constexpr (by_parts) {
      ptx::path<"forward/sm90 wide plain inner block">();
      softmax_by_parts(math);
    } else {
      products.template issue_output<true>(out.O, in_P * S::block_kv, accumulate, math, [](int) {});
      ptx::wgmma_pin(scores);  // they are ready; the end of P V may still run
    }
    if constexpr (!by_parts) softmax<kind>(math, block);
    math.drop(scores, draw);
    if constexpr (!safe) finish_output();
    if (kind == Visit::edge || (kind == Visit::listed && at.raises())) rescale_output(out.O, rescale);
    accumulate = true;
    if constexpr (!by_parts) return keep(math, block);
    products.publish_P();
    in_P = block;
  }

  /// The output of the block before, and between its stages the softmax of an interior block, which goes to P: tensor cores
  /// and exponentials work at the same time.
  __device__ __forceinline__ void softmax_by_parts(const ScoreMath<config>& math) {
    constexpr int steps = S::score_keys / 16, stages = WideProducts<config>::value_stages;
    RowState& rows = out.rows;
    float shift[2], sums[2][2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) shift[r] = -ScoreMath<config>::finite(rows.max[r]) * math.exponent_scale;
    products.template issue_output<true>(out.O, in_P * S::block_kv, accumulate, math, [&](int n) {
      if (n == 1) ptx::wgmma_pin(scores);
#pragma unroll
      for (int step = 0; step < steps; ++step) {
        if (1 + step * (stages - 1) / steps != n) continue;
        unsigned of_step[4];
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
          const int r = i / 2 % 2;
          const float p = ptx::exp2(ptx::fma(scores[8 * step + i], math.exponent_scale, shift[r]));
          const float q = ptx::exp2(ptx::fma(scores[8 * step + i + 1], math.exponent_scale, shift[r]));
          sums[r][0] += p, sums[r][1] += q;
          of_step[i / 2] = ptx::pack<S::type>(p, q);
        }
        products.store_P(step, of_step);
      }
    });
#pragma unroll
    for (int r = 0; r < 2; ++r) rows.sum[r] += sums[r][0] + sums[r][1];
  }

  /// The output of the last block.
  __device__ __forceinline__ void end(const Tile& tile, const ScoreMath<config>& math) {
    products.wait_for_P();
    if constexpr (safe) return products.add_safely(out.O, in_P * S::block_kv, tile, math);
    products.template issue_output<false>(out.O, in_P * S::block_kv, accumulate, math, [](int) {});
    finish_output();
  }

  __device__ __forceinline__ void finish_scores() {
    ptx::wgmma_wait<0>();  // the scores are ready
    ptx::wgmma_pin(scores);
    products.release_stages(1);
  }
  __device__ __forceinline__ void finish_output() {
    ptx::wgmma_wait<0>();  // O is ours again
    ptx::wgmma_pin(out.O);
    products.release_stages(1);
  }

  template <Visit kind>
  __device__ __forceinline__ void softmax(const ScoreMath<config>& math, int block) {
    if constexpr (kind == Visit::edge) {
      ptx::path<"forward/sm90 wide edge block">();
      softmax_edge(math, block, true);
    } else if constexpr (kind == Visit::listed) {
      softmax_listed(math, block);
    } else if constexpr (kind == Visit::interior) {
      ptx::path<"forward/sm90 wide inner block">();
      math.probability_of(scores, key_of(block), out.rows.max, out.rows.sum);
    } else {
      ptx::path<"forward/sm90 wide late edge block">();
      math.template modify_and_mask<!S::forwards>(scores, key_of(block));
      math.exponentiate(scores, out.rows.max, out.rows.sum);
    }
  }

  /// If masks choose, the first stage of a block says which one it is.
  __device__ __forceinline__ int issue_first_chunk(int block) {
    const int stage = products.wait_for_stage();
    if constexpr (S::listed) at = listed_block(wg, stage), block = at.block();
    products.issue_chunk(scores, 0, stage);
    return block;
  }

  /// Scores become P.
  __device__ __forceinline__ void keep(const ScoreMath<config>& math, int block) {
    typename Warpgroup<config>::PackedTile P;
    math.pack(scores, P);
#pragma unroll
    for (int step = 0; step < S::score_keys / 16; ++step) products.store_P(step, P[step]);
    products.publish_P();
    in_P = block;
  }

  /// Warpgroup::softmax_edge, with the larger of both maxima.
  __device__ __forceinline__ void softmax_edge(const ScoreMath<config>& math, int block, bool tested) {
    const int wg_begin = ptx::hide_from_compiler(math.row) / wg_rows * wg_rows, kv_begin = key_of(block);
    if constexpr (modifies_first<config.features>) {
      modify_then_hide(math, scores, kv_begin, [&] {
        return S::listed ? !tested : math.score.template all_visible<wg_rows, S::score_keys>(wg_begin, kv_begin);
      });
    } else if (S::listed ? !tested : math.score.template all_visible<wg_rows, S::score_keys>(wg_begin, kv_begin)) {
      math.modify(scores, kv_begin);
    } else {
      math.modify_and_mask(scores, kv_begin);
      if constexpr (tile::MaskData<config.features>::present) hide_pairs(math, scores, kv_begin);
    }
    RowState& rows = out.rows;
    float before[2] = {rows.max[0], rows.max[1]}, other[2];
    math.raise_maximum(scores, rows.max, rescale);
#pragma unroll
    for (int r = 0; r < 2; ++r) other[r] = rows.max[r];
    exchange(wg, other);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      rows.max[r] = ptx::max(rows.max[r], other[r]);
      rescale[r] = ptx::exp2((before[r] - ScoreMath<config>::finite(rows.max[r])) * math.exponent_scale);
      rows.sum[r] *= rescale[r];
    }
    math.exponentiate_any(scores, rows.max, rows.sum);
  }

  /// As KvLoop::softmax_listed.
  __device__ __forceinline__ void softmax_listed(const ScoreMath<config>& math, int block) {
    if (at.raises()) {
      ptx::path<"forward/sm90 wide listed edge block">();
      softmax_edge(math, block, at.tested());
    } else {
      ptx::path<"forward/sm90 wide listed full block">();
#pragma unroll
      for (float& maximum : out.rows.max) maximum = ScoreMath<config>::finite(maximum);
      math.probability_of(scores, key_of(block), out.rows.max, out.rows.sum);
    }
    visited_interior = visited_interior || !at.tested();
  }
};

/// One tile. Returns whether some block was full and its scores were not searched for a maximum. The
/// nonfinite-safe attempt searches every block, so there a row that saw only -inf is empty.
template <ForwardConfig config>
__device__ __forceinline__ bool attend_wide(Warpgroup<config>& wg, Output<config>& out, bool safe) {
  if (safe) {
    ptx::path<"forward/sm90 wide nonfinite-safe tile">();
    WideLoop<config, true>{wg, out}.run();
    return false;
  }
  WideLoop<config, false> loop{wg, out};
  loop.run();
  return loop.visited_interior;
}

}  // namespace flash_attention::forward_sm90
