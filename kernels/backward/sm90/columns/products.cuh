#pragma once

// The products of a warpgroup of backward/sm90/columns/kernel.cuh: the scores of its step, P or dS for both warpgroups,
// and its columns of the gradient.

#include "backward/sm90/columns/storage.cuh"
#include "backward/sm90/parts/products.cuh"
#include "backward/sm90/parts/scores.cuh"

namespace flash_attention::backward_sm90 {

/// The state of a warpgroup that computes. It has one step of each pair, and half of the gradient's columns.
template <BackwardConfig config, Gradient gradient>
struct ColumnsWarpgroup {
  using C = Columns<config, gradient>;
  using S = Shape<config>;
  using Math = ScoreMath<config, C::rows, tile_rows>;
  static constexpr Type type = S::type;

  const AttentionArgs& args;
  ColumnsStorage<config, gradient>& shared;
  const int index;
  const int thread;  // in the warpgroup
  PipelineState<S::stages> next{0}, oldest{0};
  unsigned phases = 0;  // bit 0: the phase of W, bit 1: that of X

  __device__ __forceinline__ void release(ptx::Mbarrier& empty) const {
    if (thread == 0) ptx::mbarrier_arrive(empty);
  }
  __device__ __forceinline__ int wait_for_stage() {
    const int stage = next.stage;
    ptx::mbarrier_wait(shared.full[stage], next.phase);
    next.advance();
    return stage;
  }
  __device__ __forceinline__ void release_stage() {
    release(shared.empty[oldest.stage]);
    if (thread == 0)
      ptx::cluster_mbarrier_arrive_read(ptx::cluster_address(&shared.empty[oldest.stage], ptx::cluster_rank() ^ 1));
    oldest.advance();
  }

  /// D = A B^T of this warpgroup's step, a stage at a time. `meanwhile` runs under the products of the first two
  /// stages. If `pending`, products of add_rows() are still running.
  template <int chunks, int steps, typename Meanwhile>
  __device__ __forceinline__ void make_scores(float (&D)[tile_rows / 2], const void* A, bool pending,
                                              const Meanwhile& meanwhile) {
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const int stage = wait_for_stage();
      const unsigned long long A_desc = ptx::wgmma_descriptor(A, 0, 1024) + chunk * (chunk_bytes / 16);
      const unsigned long long B_desc = ptx::wgmma_descriptor(shared.ring[stage] + index * chunk_elements, 0, 1024);
      ptx::wgmma_fence();  // the registers have been used for other things
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        if (4 * chunk + step >= steps) break;
        ptx::wgmma_ss<type, tile_rows, ptx::Major::k, ptx::Major::k>(D, A_desc + step * 2, B_desc + step * 2,
                                                                     chunk + step != 0);
      }
      ptx::wgmma_commit();
      if (chunk == tile::min(1, chunks - 1)) meanwhile();
      ptx::wgmma_wait<1>();  // the stage before
      if (chunk > 0 || pending) release_stage();
      if (chunk == 0 && pending) release(shared.W_empty);
    }
    ptx::wgmma_wait<0>();  // D is complete
    ptx::wgmma_pin(D);
    release_stage();
  }

  /// lse and delta: of this thread's two rows, or of all queries of the step (in shared memory).
  struct Statistics {
    const ColumnsWarpgroup& c;
    float of_rows[2][2];
    using Pair = typename Math::Pair;

    /// Loads from memory to registers, which takes long. share() then gives all threads the statistics of a step's
    /// queries.
    template <typename Step>
    __device__ __forceinline__ void load(const ColumnsTask<config, gradient>& task, const Step& place) {
      const long long padded = place.head_idx * padded_rows(c.args) + padded_start(c.args, task.sequence) + place.q_begin;
      const int thread = ptx::hide_from_compiler(c.thread);
      const int row = 16 * (thread / 32) + thread % 32 / 4, used = task.sequence.len_q - place.q_begin;
      const float* lse2 = workspace<float>(c.args, Region::lse2) + padded;
      const float* delta = workspace<float>(c.args, Region::delta) + padded;
      if constexpr (C::of_queries) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          of_rows[0][r] = row + 8 * r < used ? lse2[row + 8 * r] : tile::infinity;
          of_rows[1][r] = row + 8 * r < used ? delta[row + 8 * r] : 0;
        }
      } else {
        of_rows[0][0] = (thread < tile_rows ? lse2 : delta)[thread % tile_rows];
      }
    }
    /// All warps have read the earlier numbers: they have written W since then, and this warp has waited for it.
    __device__ __forceinline__ void share() const {
      if constexpr (C::of_queries) return;
      const int thread = ptx::hide_from_compiler(c.thread);
      c.shared.statistics[c.index][thread / tile_rows][thread % tile_rows] = of_rows[0][0];
      ptx::barrier_sync(barrier_warpgroup + c.index, wg_threads);  // the whole warpgroup has written
    }
    __device__ __forceinline__ Pair get(const Math& math, int which, int i) const {
      if constexpr (C::of_queries) return Pair{of_rows[which][Math::row_of(i)], of_rows[which][Math::row_of(i)]};
      return math.along_columns(c.shared.statistics[c.index][which], i);
    }
    __device__ __forceinline__ Pair lse2(const Math& math, int i) const { return get(math, 0, i); }
    __device__ __forceinline__ Pair delta(const Math& math, int i) const { return get(math, 1, i); }
  };

  /// Stores W of this warpgroup's step to shared memory, which both warpgroups read. Returns once the other one's W is
  /// written, too.
  __device__ __forceinline__ void publish(const typename Math::Packed& W) {
    const auto t = static_cast<unsigned>(ptx::hide_from_compiler(thread));
    ptx::mbarrier_wait(shared.W_empty, (phases & 1) ^ 1);  // no product still reads the last W
    const unsigned row = t / 32 * 16 + t % 16, place = row * 128 + (t / 16 % 2 ^ row % 8) * 16;
    auto* to = reinterpret_cast<unsigned char*>(shared.W[index]);
#pragma unroll
    for (int i = 0; i < tile_rows / 16; ++i) ptx::stmatrix_x4(to + (place ^ i * 32), W[i][0], W[i][1], W[i][2], W[i][3]);
    ptx::fence_async_shared();  // W is visible to the products
    __syncwarp();               // all lanes have written
    if (t % 32 == 0) ptx::mbarrier_arrive(shared.W_full);
    ptx::mbarrier_wait(shared.W_full, phases & 1);  // W of all warps is written
  }

  /// G += W Z for this warpgroup's columns, a stage of rows at a time. The lower half of `kept` is kept_rows() of the
  /// first step, the upper half that of the second. The products of the last stage are left running: finish_rows()
  /// waits for them, or make_scores() of the next pair.
  __device__ __forceinline__ void add_rows(int kept, float (&G)[C::width / 2]) {
    const unsigned long long W_desc = ptx::wgmma_descriptor(shared.W, 0, 1024);
#pragma unroll 1
    for (int first = 0; first < 2 * tile_rows; first += C::z_rows) {
      const int stage = wait_for_stage();
      auto* const Z = shared.ring[stage] + index * C::chunks * C::z_rows * chunk_dim;
      clear((first < tile_rows ? kept & 0xffff : kept >> 16) - first % tile_rows, Z);
      const unsigned long long Z_desc = ptx::wgmma_descriptor(Z, C::z_rows * 128, 1024);
      ptx::wgmma_fence();  // G has been written by ordinary instructions
#pragma unroll
      for (int i = 0; i < C::z_rows / 16; ++i) {
        const int row = first + 16 * i;  // W has one chunk a step
        ptx::wgmma_ss<type, C::width, ptx::Major::k, ptx::Major::mn>(
            G, W_desc + (row / tile_rows * chunk_bytes + row % tile_rows * 2) / 16, Z_desc + i * 16 * 128 / 16, true);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();  // the stage before
      if (first > 0) release_stage();
    }
  }
  __device__ __forceinline__ void finish_rows(float (&G)[C::width / 2]) {
    ptx::wgmma_wait<0>();  // G may be read and written again
    ptx::wgmma_pin(G);
    release_stage();
    release(shared.W_empty);
  }

  /// The number of rows of a step's Z that need no clear(): usually all 64. If heads are grouped, this takes a
  /// division, so it is computed once for a pair instead of for each stage.
  __device__ __forceinline__ int kept_rows(const ColumnsTask<config, gradient>& task, int step) const {
    const auto place = task.step(args, step);
    const tile::Visibility<config.features> sight(args, task.sequence, place.head_idx);
    if constexpr (C::of_queries) {
      return sight.template all_visible<tile_rows, tile_rows>(place.q_begin, place.kv_begin) &&
                     place.q_begin + tile_rows <= sight.len_q
                 ? tile_rows
                 : 0;
    } else {
      if (sight.template none_visible<tile_rows, tile_rows>(place.q_begin, place.kv_begin)) return 0;
      return S::next_sequence_rows ? tile::min(tile_rows, tile::max(task.sequence.len_q - place.q_begin, 0)) : tile_rows;
    }
  }

 private:
  /// Zeroes rows of Z that must not be multiplied: W of a hidden pair is 0, but 0 times NaN is NaN. Keys (dQ): a key
  /// that is not finite has already made dS of the queries that see it NaN, so it may be cleared here. Queries (dK,
  /// dV): rows past the last one belong to another sequence. Queries that see only some of the keys are left to
  /// backward/sm90/repair.cuh. A tile that only the keys of the cluster's other block see is not part of this task.
  __device__ __forceinline__ void clear(int kept, typename S::Element* Z) const {
    if (kept >= C::z_rows) return;
    const unsigned address = ptx::shared_address(Z);
    if constexpr (C::of_queries) {
#pragma unroll 1
      for (int i = thread; i < C::z_rows * C::chunks * 32; i += wg_threads) {
        if (!finite<type>(ptx::load_shared<unsigned>(address + 4 * i))) ptx::store_shared(address + 4 * i, 0u);
      }
    } else {
      const int used = tile::max(kept, 0), pieces = (C::z_rows - used) * 8;  // of 16 bytes, in each chunk
#pragma unroll 1
      for (int i = thread; i < pieces * C::chunks; i += wg_threads) {
        const int chunk = i / pieces, piece = i - chunk * pieces;
        ptx::store_shared(address + (chunk * C::z_rows + used) * 128 + piece * 16, ptx::Vector<unsigned, 4>{});
      }
    }
    ptx::fence_async_shared();                                 // the zeros are visible to the products
    ptx::barrier_sync(barrier_warpgroup + index, wg_threads);  // the whole warpgroup has written its zeros
  }
};

}  // namespace flash_attention::backward_sm90
