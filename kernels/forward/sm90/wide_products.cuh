#pragma once

// What a warpgroup of forward/sm90 does with wide heads besides softmax: its half of the scores, P for both warpgroups, its
// half of the output. K and V come in one ring of stages, each of which both warpgroups read:
//
//     K: 64 columns of 128 keys, of which each warpgroup has 64        V: all columns of some keys; each has half of them

#include "forward/sm90/nonfinite_safe.cuh"
#include "ptx/cluster.cuh"
#include "ptx/matrix_store.cuh"
#include "ptx/tma.cuh"

namespace flash_attention::forward_sm90 {

/// The other warpgroup's numbers of the same rows, in the place of this one's. They are here and there alternately: who
/// writes a place again has met the other since it read.
template <ForwardConfig config>
__device__ __forceinline__ void exchange(Warpgroup<config>& wg, float (&of_rows)[2]) {
  auto& place = wg.shared.exchanged[wg.place.num_exchanges++ % 2];
  const int thread = ptx::registers_fresh(wg.thread), row = thread / 32 * 16 + thread % 32 / 4;
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
      wg.release(wg.shared.KV_empty[wg.place.oldest]);
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
    const auto thread = static_cast<unsigned>(ptx::registers_fresh(wg.thread));
    const unsigned row = thread / 32 * 16 + thread % 16;
    const unsigned place = row * 128 + (thread / 16 % 2 ^ row % 8) * 16;
    auto* to = reinterpret_cast<unsigned char*>(wg.shared.O[wg.place.num_published % 2][wg.warpgroup]);
    ptx::stmatrix_x4(to + (place ^ step * 32), of_step[0], of_step[1], of_step[2], of_step[3]);
  }
  /// This warpgroup's part of P is complete, and so are its products with the last one.
  __device__ __forceinline__ void publish_P() const {
    ptx::fence_async_shared();  // P before the products' reads
    __syncwarp();               // that of the whole warp
    if (ptx::registers_fresh(wg.thread) % 32 == 0) ptx::mbarrier_arrive(wg.shared.P_full);
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

}  // namespace flash_attention::forward_sm90
