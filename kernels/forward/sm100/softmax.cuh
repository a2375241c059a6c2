#pragma once

// A softmax warpgroup of forward/sm100: the scores of one Q tile, a thread for each row, so that nothing is exchanged
// between threads.
//
//   for each KV block that the Q tile sees:
//     wait for S;  load it;  options and mask
//     raise the maximum;  tell the output warp by what O is to be multiplied
//     P = 2^(S - max), in 16 bits, to tensor memory
//   tell the output warp the row's sum and maximum
//
// A maximum that rises by less than 2^8 is not used: probabilities up to 2^8 lose nothing, and O is rarely rescaled.

#include "forward/sm100/tiles.cuh"
#include "ptx/float_pairs.cuh"
#include "ptx/memory.cuh"
#include "ptx/path.cuh"
#include "ptx/warp.cuh"
#include "tile/fixed_order.cuh"
#include "tile/softmax.cuh"

namespace flash_attention::forward_sm100 {

/// Scores of one row.
template <ForwardConfig config>
struct RowScores {
  using S = Shape<config>;
  static constexpr Features features = S::features;
  static constexpr bool linear = tile::Score<features>::linear;
  // What reads memory for each score needs registers: a few scores at a time become others in tensor memory.
  static constexpr bool by_parts =
      features.bias || features.score_program || features.mask || features.has_mask_data() || features.bit_mask();

  const tile::Score<features>& score;
  int i;  // the query

  using ProgramRow = typename tile::Score<features>::ProgramRow;
  __device__ __forceinline__ float modified(float dot, int row, int j, const ProgramRow& of_program) const {
    const float capped = tile::capped_score<features.softcap>(dot, score.scale, score.softcap, score.added(row, j));
    return score.programmed(capped, of_program, score.program.key(j));
  }

  /// Dot products of neighbouring keys become scores, in units of Score::unit_scale; -inf if hidden.
  template <bool some_hidden, int count>
  __device__ __forceinline__ void modify(float (&scores)[count], int kv_begin) const {
    const tile::KeyRange range = score.sight.keys_of(i);
    // Rows past the last query may be in the tile. They read the last row's bias and are not stored.
    const int existing = tile::max(tile::min(i, score.sight.len_q - 1), 0);
    const ProgramRow of_program = score.program.row(existing);
#pragma unroll
    for (int n = 0; n < count; ++n) {
      const int j = kv_begin + n;
      const bool hidden = some_hidden && !score.sight.visible(range, i, j);
      if constexpr (linear) {
        scores[n] = hidden ? -tile::infinity : scores[n];
      } else if constexpr (by_parts) {
        scores[n] = hidden ? -tile::infinity : modified(scores[n], existing, j, of_program);
      } else {
        const float result = modified(scores[n], existing, j, of_program);  // no branch: nothing is read
        scores[n] = hidden ? -tile::infinity : result;
      }
    }
  }
};

template <ForwardConfig config>
struct Softmax {
  using S = Shape<config>;
  static constexpr Features features = S::features;
  using Row = float[S::block_kv];
  using Scores = RowScores<config>;
  static constexpr float largest_rise = 8;                                // of the maximum, in powers of two
  static constexpr int columns = 32;                                      // that are loaded or stored at a time
  static constexpr bool exact = features.bias || features.score_program;  // maxima may be large

  const AttentionArgs& args;
  SharedStorage<config>& shared;
  const int t;            // the Q tile
  const unsigned base;    // of tensor memory
  const int row;          // of the Q tile
  const unsigned S_tmem;  // this warp's lanes of S
  unsigned num_blocks = 0;
  unsigned num_mails = 0;

  __device__ __forceinline__ Softmax(const AttentionArgs& arguments, SharedStorage<config>& storage, int q_tile,
                                     unsigned tensor_base)
      : args(arguments),
        shared(storage),
        t(q_tile),
        base(tensor_base),
        row(static_cast<int>(threadIdx.x) % wg_threads),
        S_tmem((tensor_base + S::column_S(q_tile)) | static_cast<unsigned>(row / 32 * 32) << 16) {}

  __device__ __forceinline__ void attend(const Tile<config>& tile) {
    const Scores of_row{tile.score, tile.first_row(t) + row};
    const float scale_log2 = tile.score.unit_scale() * tile::log2_e;
    float maximum = -tile::infinity, sum = 0;
    bool is_first = true;
    tile.for_blocks([&](int block, unsigned seen) {
      if ((seen >> t & 1) == 0) return;
      const int kv_begin = block * S::block_kv;
      Row scores;
      ptx::mbarrier_wait(shared.S_full[t], static_cast<int>(num_blocks++ & 1));
      ptx::tcgen05_fence_after();  // S, which a product has written
      if (!tile.score.sight.template all_visible<rows, S::block_kv>(tile.first_row(t), kv_begin)) {
        ptx::path<"forward/sm100 edge block">();
        load_modified<true>(scores, of_row, kv_begin);
      } else if constexpr (!Scores::linear) {
        load_modified<false>(scores, of_row, kv_begin);
      } else {
        load(scores);
      }
      const float rescale = raise_maximum(scores, maximum, scale_log2);
      if (!is_first) send(rescale, 0);
      is_first = false;
      const float block_sum = write_probabilities(scores, maximum, scale_log2);
      sum = ptx::fma(sum, rescale, block_sum);
    });
    if (!is_first) send(sum, maximum == -tile::infinity ? maximum : maximum * scale_log2);
  }

 private:
  /// Loads a row of S and applies options and mask.
  template <bool some_hidden>
  __device__ __forceinline__ void load_modified(Row& scores, const Scores& of_row, int kv_begin) const {
    if constexpr (Scores::by_parts) {
#pragma unroll 1
      for (int part = 0; part < S::block_kv; part += columns) {
        float some[columns];
        ptx::tmem_load(some, S_tmem + part);
        ptx::tmem_wait_load();
        ptx::tmem_pin(some);
        of_row.template modify<some_hidden>(some, kv_begin + part);
        ptx::tmem_store(S_tmem + part, some);
      }
      ptx::tmem_wait_store();
      load(scores);
    } else {
      load(scores);
      of_row.template modify<some_hidden>(scores, kv_begin);
    }
  }

  __device__ __forceinline__ void load(Row& scores) const {
    float(&parts)[S::block_kv / columns][columns] = reinterpret_cast<float(&)[S::block_kv / columns][columns]>(scores);
#pragma unroll
    for (int part = 0; part < S::block_kv / columns; ++part) ptx::tmem_load(parts[part], S_tmem + part * columns);
    ptx::tmem_wait_load();
    ptx::tmem_pin(scores);
  }

  /// Raises the maximum where it rises by much. Returns the factor of what was added up before.
  __device__ __forceinline__ float raise_maximum(const Row& scores, float& maximum, float scale_log2) const {
    float largest[4] = {maximum, maximum, maximum, maximum};  // four chains of comparisons
#pragma unroll
    for (int n = 0; n < S::block_kv; n += 8) {
#pragma unroll
      for (int chain = 0; chain < 4; ++chain)
        largest[chain] = ptx::max3(largest[chain], scores[n + 2 * chain], scores[n + 2 * chain + 1]);
    }
    const float raised = ptx::max(ptx::max(largest[0], largest[1]), ptx::max(largest[2], largest[3]));
    if ((raised - maximum) * scale_log2 <= largest_rise) return 1;
    const float rescale = ptx::exp2((maximum - finite(raised)) * scale_log2);
    maximum = raised;
    return rescale;
  }

  /// A row that has seen no key has the maximum -inf. Any finite reference will do.
  __device__ __forceinline__ static float finite(float maximum) { return maximum == -tile::infinity ? 0 : maximum; }

  /// Writes P over S, and returns its sum.
  __device__ __forceinline__ float write_probabilities(Row& scores, float maximum, float scale_log2) {
    float reference = finite(maximum) * scale_log2;
    // A large maximum is taken off before the scale: the rounding error of their product would be an exponent.
    if (exact || ptx::any(ptx::abs(reference) > tile::large_reference)) {
#pragma unroll
      for (int n = 0; n < S::block_kv; ++n) scores[n] -= finite(maximum);
      reference = 0;
    }
    ptx::FloatPair sums[2] = {{0, 0}, {0, 0}};
#pragma unroll
    for (int part = 0; part < S::block_kv; part += columns) {
      unsigned P[columns / 2];
#pragma unroll
      for (int n = 0; n < columns; n += 2) {
        const ptx::FloatPair x =
            ptx::fma_pair({scores[part + n], scores[part + n + 1]}, {scale_log2, scale_log2}, {-reference, -reference});
        const ptx::FloatPair p = {ptx::exp2(x.x), ptx::exp2(x.y)};
        sums[n / 2 % 2] = ptx::add_pair(sums[n / 2 % 2], p);
        P[n / 2] = ptx::pack<S::type>(p.x, p.y);
      }
      ptx::tmem_store(S_tmem + part / 2, P);
    }
    ptx::tmem_wait_store();
    ptx::tcgen05_fence_before();
    arrive_warp(shared.P_ready[t]);
    return sums[0].x + sums[0].y + (sums[1].x + sums[1].y);
  }

  /// To the output warp of the same rows.
  __device__ __forceinline__ void send(float first, float second) {
    ptx::mbarrier_wait(shared.mail_empty[t], static_cast<int>(num_mails++ & 1) ^ 1);  // it has read the mail before
    ptx::store_shared(ptx::shared_address(&shared.mail[t].first[row]), first);
    ptx::store_shared(ptx::shared_address(&shared.mail[t].second[row]), second);
    arrive_warp(shared.mail_full[t]);
  }
};

}  // namespace flash_attention::forward_sm100
