#pragma once

// The products of forward/sm90 for wide heads. A warpgroup computes half of the scores, writes its P for both warpgroups,
// and computes half of the output's columns. K and V share one ring of stages; both warpgroups read each stage:
//
//     stage of K: 64 columns of 128 keys, 64 keys for each warpgroup stage of V: some keys, half of the columns for each

#include "forward/sm90/kv_loop.cuh"
#include "forward/sm90/nonfinite_loop.cuh"
#include "ptx/cluster.cuh"
#include "ptx/matrix_store.cuh"
#include "ptx/path.cuh"
#include "ptx/tma.cuh"

namespace flash_attention::forward_sm90 {

/// Replaces this warpgroup's numbers of the rows by the other warpgroup's. Two buffers are used alternately. So one barrier
/// is enough: before a buffer is written again, there was another barrier after it was read.
template <ForwardConfig config>
__device__ __forceinline__ void exchange(Warpgroup<config>& wg, float (&of_rows)[2]) {
  auto& place = wg.shared.exchanged[wg.place.num_exchanges++ % 2];
  const int thread = ptx::hide_from_compiler(wg.thread), row = thread / 32 * 16 + thread % 32 / 4;
  if (thread % 4 == 0) {
#pragma unroll
    for (int r = 0; r < 2; ++r) place[wg.warpgroup][row + 8 * r] = of_rows[r];
  }
  ptx::barrier_sync(barrier_attend, 2 * wg_threads);  // both warpgroups have written
#pragma unroll
  for (int r = 0; r < 2; ++r) of_rows[r] = place[1 - wg.warpgroup][row + 8 * r];
}

/// A warpgroup's row sums are over its own keys. One of the four threads of a row adds the other warpgroup's sum.
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

  /// Waits until the next stage has landed.
  __device__ __forceinline__ int wait_for_stage() const {
    auto& next = wg.place.next;
    const int stage = next.stage;
    ptx::mbarrier_wait(wg.shared.KV_full[stage], next.phase);
    next.advance();
    return stage;
  }
  /// Releases the oldest stages: the products that read them are complete.
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

  /// Issues the products of 64 columns of scores = Q K^T, as one group.
  __device__ __forceinline__ void issue_chunk(ScoreTile& scores, int chunk, int stage) const {
    const Descriptor Q(ptx::wgmma_descriptor(wg.shared.Q[0][0], 0, 1024));
    const Descriptor K(ptx::wgmma_descriptor(wg.shared.KV[stage], 0, 1024));
    const int columns = chunk == S::chunks - 1 ? S::steps_qk - 4 * (S::chunks - 1) : 4;
    ptx::wgmma_fence();  // orders the softmax's accesses to these registers before the product's
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      if (step >= columns) break;
      ptx::wgmma_ss<S::type, S::score_keys, ptx::Major::k, ptx::Major::k>(
          scores, Q.at(chunk * wg_rows * 128 + step * 32), K.at(wg.warpgroup * S::score_keys * 128 + step * 32),
          chunk + step != 0);
    }
    ptx::wgmma_commit();
  }
  /// Issues the chunks after the first. Each one is waited for after the next one is issued, so at the end one stage is not
  /// released.
  __device__ __forceinline__ void issue_other_chunks(ScoreTile& scores) const {
#pragma unroll 1
    for (int chunk = 1; chunk < S::chunks; ++chunk) {
      issue_chunk(scores, chunk, wait_for_stage());
      ptx::wgmma_wait<1>();  // the previous chunk
      release_stages(1);
    }
  }

  /// Before a tile's first P: the store of the previous tile's O must have read the buffer that they share.
  __device__ __forceinline__ void begin_P() const {
    if (wg.thread == 0) {
      ptx::bulk_wait_read<0>();
      ptx::mbarrier_arrive(wg.shared.P_empty);
    }
    ptx::mbarrier_wait(wg.shared.P_empty, wg.place.num_tiles++ % 2);
  }
  /// Writes 16 keys of P to shared memory, for both warpgroups. Two buffers are used alternately. When a warpgroup has seen
  /// P of the previous block, both have finished with the P before that, so its buffer is free.
  __device__ __forceinline__ void store_P(int step, const unsigned (&of_step)[4]) const {
    const auto thread = static_cast<unsigned>(ptx::hide_from_compiler(wg.thread));
    const unsigned row = thread / 32 * 16 + thread % 16;
    const unsigned place = row * 128 + (thread / 16 % 2 ^ row % 8) * 16;
    auto* to = reinterpret_cast<unsigned char*>(wg.shared.O[wg.place.num_published % 2][wg.warpgroup]);
    ptx::stmatrix_x4(to + (place ^ step * 32), of_step[0], of_step[1], of_step[2], of_step[3]);
  }
  /// Publishes this warpgroup's part of P. Its products with the previous P are complete.
  __device__ __forceinline__ void publish_P() const {
    ptx::fence_async_shared();  // orders P before the products' reads
    __syncwarp();               // all lanes have written
    if (ptx::hide_from_compiler(wg.thread) % 32 == 0) ptx::mbarrier_arrive(wg.shared.P_full);
    ++wg.place.num_published;
  }
  __device__ __forceinline__ void wait_for_P() const {
    ptx::mbarrier_wait(wg.shared.P_full, (wg.place.num_published - 1) % 2);  // all warps have written P
  }

  /// Issues O += P V, or O = P V. Each stage is released as soon as the next one has been issued, because the amount of
  /// data in flight from L2 bounds this kernel. At the end one stage of V is not released yet; a stage of K is, if scores
  /// were issued before. meanwhile(n) is called after stage n has been issued, from the second stage on: by then the scores
  /// are complete.
  template <bool after_scores, typename Meanwhile>
  __device__ __forceinline__ void issue_output(OutputTile& O, int kv_begin, bool accumulate, const ScoreMath<config>& math,
                                               const Meanwhile& meanwhile) const {
#pragma unroll  // so that the number of products in flight is a constant
    for (int n = 0; n < value_stages; ++n) {
      issue_stage(O, n, next_values(n, kv_begin, math), accumulate || n != 0);
      if (n > 0) meanwhile(n);
      ptx::wgmma_wait<1>();  // the previous stage's products
      if (after_scores || n > 0) release_stages(1);
    }
  }

  /// O += P V if V may hold NaN or Inf: only rows that see them get them.
  __device__ __forceinline__ void add_safely(OutputTile& O, int kv_begin, const Tile& tile,
                                             const ScoreMath<config>& math) const {
#pragma unroll 1
    for (int n = 0; n < value_stages; ++n) {
      auto* const V = next_values(n, kv_begin, math);
      add_nonfinite<S::value_rows>(wg, O, ptx::shared_address(V), kv_begin + n * S::value_rows, tile, math);
      clear_all_nonfinite(V);
      issue_stage(O, n, V, true);
      ptx::wgmma_wait<0>();  // O may be read and written again
      ptx::wgmma_pin(O);
      release_stages(1);
    }
  }

 private:
  /// Waits for the next stage of V; returns where this warpgroup's columns begin.
  __device__ __forceinline__ typename S::Element* next_values(int n, int kv_begin, const ScoreMath<config>& math) const {
    const int stage = wait_for_stage();
    auto* const V = wg.shared.KV[stage] + wg.warpgroup * S::chunks_v * S::value_rows * chunk_dim;
    clear_hidden(V, math.score.sight.visible_kv - kv_begin - n * S::value_rows);
    return V;
  }

  /// Issues the products of the n-th stage of V.
  __device__ __forceinline__ void issue_stage(OutputTile& O, int n, const typename S::Element* values,
                                              bool accumulate) const {
    const Descriptor P(ptx::wgmma_descriptor(wg.shared.O[(wg.place.num_published - 1) % 2], 0, 1024));
    const Descriptor V(ptx::wgmma_descriptor(values, S::value_rows * 128, 1024));
    ptx::wgmma_fence();  // ordinary instructions have written O
#pragma unroll
    for (int step = 0; step < S::value_rows / 16; ++step) {
      const int key = n * S::value_rows + step * 16;  // P has a chunk for each 64 keys
      ptx::wgmma_ss<S::type, S::width_v, ptx::Major::k, ptx::Major::mn>(O, P.at(key / 64 * wg_rows * 128 + key % 64 * 2),
                                                                        V.at(step * 16 * 128), accumulate || step != 0);
    }
    ptx::wgmma_commit();
  }

  /// Zeroes rows of V after the last visible key. They may hold NaN, and a probability of 0 times NaN is NaN.
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
  /// Replaces NaN and Inf in this warpgroup's columns by 0.
  __device__ __forceinline__ void clear_all_nonfinite(typename S::Element* V) const {
    ptx::barrier_sync(barrier_warpgroup + wg.warpgroup, wg_threads);  // all have read the original V
#pragma unroll 1
    for (int i = wg.thread; i < S::value_rows * S::chunks_v * 32; i += wg_threads) {
      const unsigned address = ptx::shared_address(V) + 4 * i;
      if (has_nonfinite<S::type>(ptx::load_shared<unsigned>(address))) ptx::store_shared(address, 0u);
    }
    sync_writes();
  }
  __device__ __forceinline__ void sync_writes() const {
    ptx::fence_async_shared();                                        // orders the zeros before the products' reads
    ptx::barrier_sync(barrier_warpgroup + wg.warpgroup, wg_threads);  // all have written their zeros
  }
};

// The loop of forward/sm90 for head dimensions above 256. O of 64 rows is too wide for the registers of one warpgroup. So
// two warpgroups share the same rows, and each holds half of O's columns. Of a block of 128 keys each computes the scores
// of 64, so no score is computed twice. P goes through shared memory, where the products of both warpgroups read it.
//
//     S = Q K(first)^T of my keys; P = softmax(S) to shared memory
//     for each other block:
//       issue S = Q K^T in chunks of 64 columns; wait for the other warpgroup's P of the previous block
//       issue O += P V of the previous block, a stage of keys at a time; in between: softmax of S to the other buffer of P
//     O += P V(last)
//
// In an edge block the warpgroups exchange their maxima, because both use the same one. An interior block keeps the maximum
// as a reference (kv_loop.cuh), so there is nothing to exchange. Until the end of the tile a warpgroup's row sums are over
// its own keys only.

template <ForwardConfig config, bool safe>
struct WideLoop {
  using S = Shape<config>;

  Warpgroup<config>& wg;
  Output<config>& out;
  WideProducts<config> products{wg};
  typename Warpgroup<config>::ScoreTile scores;
  float rescale[2];                          // of O, by the block of the scores
  bool accumulate = false;                   // O already holds a sum of this tile
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
        if constexpr (S::forwards || S::left_edge) {
#pragma unroll 1
          for (; n < seen.end; ++n) visit<Visit::late_edge>(tile, math, block_at<config>(tile, n));
        }
      }
    }
    release_queries(wg);
    end(tile, math);
  }

 private:
  /// The first key of a block whose scores this warpgroup computes.
  __device__ __forceinline__ int key_of(int block) const { return block * S::block_kv + wg.warpgroup * S::score_keys; }

  /// Scores and softmax of the first block.
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

  /// A later block: its scores, the output of the previous block, its softmax.
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
      ptx::wgmma_pin(scores);  // the scores are ready; the end of P V may still run
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

  /// The output of the previous block. Between its stages, the softmax of an interior block is computed and written to P,
  /// so exponentials overlap with the tensor cores.
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

  /// O += P V of the last block.
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
    ptx::wgmma_wait<0>();  // O may be read and written again
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
      math.probability_of(scores, key_of(block), out.rows.max, out.rows.sum, out.statistics);
    } else {
      ptx::path<"forward/sm90 wide late edge block">();
      math.template modify_and_mask<!S::forwards>(scores, key_of(block));
      math.exponentiate(scores, out.rows.max, out.rows.sum, out.statistics);
    }
  }

  /// If masks choose the blocks, the number of a block is published with its first stage.
  __device__ __forceinline__ int issue_first_chunk(int block) {
    const int stage = products.wait_for_stage();
    if constexpr (S::listed) at = listed_block(wg, stage), block = at.block();
    products.issue_chunk(scores, 0, stage);
    return block;
  }

  /// Turns scores into P.
  __device__ __forceinline__ void keep(const ScoreMath<config>& math, int block) {
    typename Warpgroup<config>::PackedTile P;
    math.pack(scores, P);
#pragma unroll
    for (int step = 0; step < S::score_keys / 16; ++step) products.store_P(step, P[step]);
    products.publish_P();
    in_P = block;
  }

  /// As softmax_edge() of warpgroup.cuh, with the larger of both warpgroups' maxima.
  __device__ __forceinline__ void softmax_edge(const ScoreMath<config>& math, int block, bool tested) {
    const int wg_begin = ptx::hide_from_compiler(math.row) / wg_rows * wg_rows, kv_begin = key_of(block);
    if constexpr (modifies_first<config.features>) {
      modify_then_hide(math, scores, kv_begin, [&] {
        return S::listed ? !tested : math.score.sight.template all_visible<wg_rows, S::score_keys>(wg_begin, kv_begin);
      });
    } else if (S::listed ? !tested : math.score.sight.template all_visible<wg_rows, S::score_keys>(wg_begin, kv_begin)) {
      math.modify(scores, kv_begin);
    } else {
      math.modify_and_mask(scores, kv_begin);
      if constexpr (tile::MaskData<config.features>::present) hide_pairs(math, scores, kv_begin);
    }
    RowState& rows = out.rows;
    float before[2] = {rows.max[0], rows.max[1]}, other[2];
    math.raise_maximum(scores, rows.max, rescale, out.statistics, rows.sum);
#pragma unroll
    for (int r = 0; r < 2; ++r) other[r] = rows.max[r];
    exchange(wg, other);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      rows.max[r] = ptx::max(rows.max[r], other[r]);
      rescale[r] = ptx::exp2((before[r] - ScoreMath<config>::finite(rows.max[r])) * math.exponent_scale);
      rows.sum[r] *= rescale[r];
    }
    math.exponentiate_any(scores, rows.max, rows.sum, out.statistics);
  }

  /// As softmax_listed() of listed_loop.cuh.
  __device__ __forceinline__ void softmax_listed(const ScoreMath<config>& math, int block) {
    if (at.raises()) {
      ptx::path<"forward/sm90 wide listed edge block">();
      softmax_edge(math, block, at.tested());
    } else {
      ptx::path<"forward/sm90 wide listed full block">();
#pragma unroll
      for (float& maximum : out.rows.max) maximum = ScoreMath<config>::finite(maximum);
      math.probability_of(scores, key_of(block), out.rows.max, out.rows.sum, out.statistics);
    }
    visited_interior = visited_interior || !at.tested();
  }
};

/// The loop over one tile. Returns whether a block was full, so that its scores were not searched for a maximum. The
/// nonfinite-safe attempt searches every block, so there a row whose scores were all -inf counts as empty.
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
