#pragma once

// The output warpgroup of forward/sm100: it rescales O where the maximum of a row has risen, and stores the result.
// Warp w has the same rows as warp w of each softmax warpgroup.
//
//   for each KV block, for each Q tile that sees it, but the first block of each:
//     wait for the factors of the rows;  O = O * factor in tensor memory, if one of the warp's is not 1
//   for each Q tile:  wait for the rows' sums and for the last product;  O / sum -> global memory, lse

#include "forward/repair.cuh"
#include "forward/sm100/tiles.cuh"
#include "ptx/memory.cuh"
#include "ptx/path.cuh"
#include "ptx/warp.cuh"
#include "tile/softmax.cuh"

namespace flash_attention::forward_sm100 {

template <ForwardConfig config>
struct Output {
  using S = Shape<config>;
  using Element = typename S::Element;
  static constexpr Features features = S::features;
  static constexpr int columns = S::width_v % 32 == 0 ? 32 : 16;  // of O at a time

  const AttentionArgs& args;
  SharedStorage<config>& shared;
  const unsigned base;  // of tensor memory
  const int row = static_cast<int>(threadIdx.x) % wg_threads;
  unsigned num_mails[S::q_tiles] = {};
  unsigned num_blocks[S::q_tiles] = {};  // for which P_ready was told

  __device__ __forceinline__ void complete(const Tile<config>& tile) {
    bool has_output[S::q_tiles];
#pragma unroll
    for (int t = 0; t < S::q_tiles; ++t) has_output[t] = false;
    tile.for_blocks([&](int, unsigned seen) {
#pragma unroll
      for (int t = 0; t < S::q_tiles; ++t) {
        if ((seen >> t & 1) == 0) continue;
        if (has_output[t]) rescale(t);
        ptx::tcgen05_fence_before();  // O is rescaled; of the tile before it is stored
        arrive_warp(shared.P_ready[t]);
        ++num_blocks[t];
        has_output[t] = true;
      }
    });
#pragma unroll
    for (int t = 0; t < S::q_tiles; ++t) finish(tile, t, has_output[t]);
  }

 private:
  __device__ __forceinline__ unsigned O_tmem(int t) const {
    return (base + S::column_O(t)) | static_cast<unsigned>(row / 32 * 32) << 16;
  }

  /// Waits for a mail of the softmax warp; returns what it says of this row.
  __device__ __forceinline__ void receive(int t, float& first, float& second) {
    ptx::mbarrier_wait(shared.mail_full[t], static_cast<int>(num_mails[t]++ & 1));
    first = ptx::load_shared<float>(ptx::shared_address(&shared.mail[t].first[row]));
    second = ptx::load_shared<float>(ptx::shared_address(&shared.mail[t].second[row]));
    arrive_warp(shared.mail_empty[t]);
  }

  /// O of the blocks so far is complete: the softmax warp has waited for S, which was multiplied after it.
  __device__ __forceinline__ void rescale(int t) {
    float factor, unused;
    receive(t, factor, unused);
    if (ptx::all(factor == 1)) return;
    ptx::path<"forward/sm100 rescaled output">();
    ptx::tcgen05_fence_after();
#pragma unroll
    for (int c = 0; c < S::width_v; c += columns) {
      float O[columns];
      ptx::tmem_load(O, O_tmem(t) + c);
      ptx::tmem_wait_load();
      ptx::tmem_pin(O);
#pragma unroll
      for (int i = 0; i < columns; ++i) O[i] *= factor;
      ptx::tmem_store(O_tmem(t) + c, O);
    }
    ptx::tmem_wait_store();
  }

  /// Writes O and lse of a Q tile.
  __device__ __forceinline__ void finish(const Tile<config>& tile, int t, bool has_output) {
    const tile::Sequence& sequence = tile.sequence;
    const int i = tile.first_row(t) + row;
    float sum = 0, maximum = -tile::infinity, sink = -tile::infinity, lse;
    if (has_output) receive(t, sum, maximum);
    const bool used = i < sequence.len_q;
    if constexpr (features.sink) sink = args.sink[tile.head_idx];
    float factor = tile::finish_row(maximum, sum, used ? sink : -tile::infinity, lse);
    if (!used) factor = 0, lse = -tile::infinity;
    if (args.lse != nullptr && i < sequence.rows_q)
      args.lse[tile::statistics_offset<features>(args, sequence, tile.head_idx) + i] = lse;
    if (has_output) {
      ptx::mbarrier_wait(shared.O_done[t], static_cast<int>((num_blocks[t] - 1) & 1));  // the last product
      ptx::tcgen05_fence_after();
    }

    Element* const to = tile::query_rows<Element, features>(args.O, sequence, tile.head_idx).row(i);
    float check = 0;  // becomes NaN if an output is not finite
#pragma unroll
    for (int c = 0; c < S::width_v; c += columns) {
      float O[columns];
      if (has_output) {
        ptx::tmem_load(O, O_tmem(t) + c);
        ptx::tmem_wait_load();
        ptx::tmem_pin(O);
      }
#pragma unroll
      for (int d = 0; d < columns; d += 8) {
        ptx::Vector<unsigned, 4> eight;
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
          const float x = factor == 0 ? 0 : O[d + 2 * pair] * factor, y = factor == 0 ? 0 : O[d + 2 * pair + 1] * factor;
          if constexpr (S::repairs_rows) check = ptx::fma(x, 0, ptx::fma(y, 0, check));
          eight[pair] = ptx::pack<S::type>(x, y);
        }
        if (i < sequence.rows_q && c + d < config.head_dim_v)
          ptx::store_global(reinterpret_cast<ptx::Vector<unsigned, 4>*>(to + c + d), eight);
      }
    }
    if constexpr (S::repairs_rows) repair(tile, i, lse, used && check != check);
  }

  /// Rows that 0 * NaN has reached are computed again, by the whole warp one after another.
  __device__ __forceinline__ void repair(const Tile<config>& tile, int i, float lse, bool unsound) const {
    unsigned left = ptx::ballot(unsound);
    if (left == 0) return;
    __syncwarp();  // all have stored their rows
    const auto O = tile::query_rows<Element, features>(args.O, tile.sequence, tile.head_idx);
#pragma unroll 1
    for (; left != 0; left &= left - 1) {
      ptx::path<"forward/sm100 repaired row">();
      const int lane = ptx::trailing_zeros(left);
      const int its_i = ptx::shuffle(i, lane);
      repaired_output<config>(args, tile.sequence, tile.head_idx, its_i, ptx::shuffle(lse, lane))
          .store(O.row(its_i), 1, static_cast<int>(threadIdx.x % 32));
    }
  }
};

}  // namespace flash_attention::forward_sm100
