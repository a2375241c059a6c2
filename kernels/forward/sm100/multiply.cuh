#pragma once

// The thread of forward/sm100 that issues all products.
//
//   for each KV block of a tile, and once more behind the last one:
//     for each Q tile t:
//       wait until P_t of the block before is written and O_t rescaled;  O_t += P_t V;  commit O_done
//       wait for that product, which reads P_t;                          S_t = Q_t K^T of this block;  commit S_full
//     commit that V of the block before and K of this one are free
//
// So the softmax of one Q tile runs under the products of the other. S_t lies where P_t was read, and products of different
// accumulators are in no order: the thread waits for its own product in between.

#include "forward/sm100/tiles.cuh"
#include "tile/pipeline.cuh"

namespace flash_attention::forward_sm100 {

template <ForwardConfig config>
struct Multiplier {
  using S = Shape<config>;

  SharedStorage<config>& shared;
  const unsigned base;  // of tensor memory
  tile::PipelineState<S::k_stages> k{0};
  tile::PipelineState<S::v_stages> v{0};
  unsigned num_queries[S::q_tiles] = {};  // Q tiles so far
  unsigned num_values[S::q_tiles] = {};   // products with V so far

  __device__ __forceinline__ void multiply(const Tile<config>& tile) {
    bool is_first[S::q_tiles];  // product with V of the tile
#pragma unroll
    for (int t = 0; t < S::q_tiles; ++t) is_first[t] = true;
    unsigned before = 0;  // the Q tiles that saw the block before
    tile.for_blocks([&](int, unsigned seen) {
      step(tile, seen, before, is_first);
      before = seen;
    });
    if (before == 0) return;
    release_queries(tile);
    step(tile, 0, before, is_first);
  }

 private:
  /// Products with V of the block before, for the Q tiles `before`, and with K of this block, for the Q tiles `seen`.
  __device__ __forceinline__ void step(const Tile<config>& tile, unsigned seen, unsigned before,
                                       bool (&is_first)[S::q_tiles]) {
    if (before != 0) ptx::mbarrier_wait(shared.V_full[v.stage], v.phase);
    if (seen != 0) ptx::mbarrier_wait(shared.K_full[k.stage], k.phase);
#pragma unroll
    for (int t = 0; t < S::q_tiles; ++t) {
      if ((before >> t & 1) != 0) {
        ptx::mbarrier_wait(shared.P_ready[t], static_cast<int>(num_values[t] & 1));
        ptx::tcgen05_fence_after();  // P and O, which other threads have written
        multiply_values(t, is_first[t]);
        ptx::tcgen05_commit(shared.O_done[t]);
        ++num_values[t];
        is_first[t] = false;
      }
      if (before == 0 && tile.has_keys(t)) ptx::mbarrier_wait(shared.Q_full[t], static_cast<int>(num_queries[t] & 1));
      if ((seen >> t & 1) != 0) {
        // P, over which S is written, has been read.
        if (num_values[t] != 0) ptx::mbarrier_wait(shared.O_done[t], static_cast<int>((num_values[t] - 1) & 1));
        ptx::tcgen05_fence_after();
        multiply_keys(t);
        ptx::tcgen05_commit(shared.S_full[t]);
      }
    }
    if (before != 0) {
      ptx::tcgen05_commit(shared.V_empty[v.stage]);
      v.advance();
    }
    if (seen != 0) {
      ptx::tcgen05_commit(shared.K_empty[k.stage]);
      k.advance();
    }
  }

  /// S_t = Q_t K^T.
  __device__ __forceinline__ void multiply_keys(int t) const {
    using Major = ptx::Tcgen05Major;
    constexpr unsigned shape = ptx::tcgen05_shape<S::type, S::block_kv, Major::k, Major::k>();
    constexpr int atom_bytes = 8 * chunk_row_bytes;
    const auto Q = ptx::tcgen05_descriptor(shared.Q[t], 16, atom_bytes);
    const auto K = ptx::tcgen05_descriptor(shared.K[k.stage], 16, atom_bytes);
#pragma unroll 4  // descriptors of all steps would fill the registers
    for (int step = 0; step < S::steps_qk; ++step) {
      const int chunk = step / 4, bytes = step % 4 * 32;
      ptx::tcgen05_mma_ss(base + S::column_S(t), Q + (chunk * rows * chunk_row_bytes + bytes) / 16,
                          K + (chunk * S::block_kv * chunk_row_bytes + bytes) / 16, shape, step != 0);
    }
  }

  /// O_t += P_t V; the first product of a tile overwrites.
  __device__ __forceinline__ void multiply_values(int t, bool is_first) const {
    using Major = ptx::Tcgen05Major;
    constexpr unsigned shape = ptx::tcgen05_shape<S::type, S::width_v, Major::k, Major::mn>();
    const auto V = ptx::tcgen05_descriptor(shared.V[v.stage], S::block_kv * chunk_row_bytes, 8 * chunk_row_bytes);
#pragma unroll 4
    for (int step = 0; step < S::steps_pv; ++step) {
      ptx::tcgen05_mma_ts(base + S::column_O(t), base + S::column_S(t) + 8 * step, V + step * 16 * chunk_row_bytes / 16,
                          shape, !is_first || step != 0);
    }
  }

  /// Q may be overwritten when all products so far are done.
  __device__ __forceinline__ void release_queries(const Tile<config>& tile) {
#pragma unroll
    for (int t = 0; t < S::q_tiles; ++t) {
      if (!tile.has_keys(t)) continue;
      ptx::tcgen05_commit(shared.Q_empty[t]);
      ++num_queries[t];
    }
  }
};

}  // namespace flash_attention::forward_sm100
