#pragma once

#include "decode/mla_sm90/storage.cuh"
#include "decode/scores.cuh"
#include "ptx/async.cuh"

// S = Q K^T of decode/mla_sm90: loads Q of an item to shared memory, multiplies it with a KV block, applies options and
// mask.

namespace flash_attention::mla {

/// A thread's place in its warpgroup and in accumulators. It is computed again at each use; keeping it would take
/// registers.
struct Place {
  int thread, warpgroup, lane, warp;
  int row, column;  // the first of its two rows, and its first column in each block of 8

  __device__ __forceinline__ Place() {
    thread = ptx::hide_from_compiler(static_cast<int>(threadIdx.x));
    warpgroup = thread / wg_threads;
    lane = thread % 32;
    warp = thread / 32 % 4;
    row = 16 * warp + lane / 4;
    column = lane % 4 * 2;
  }
};

template <ForwardConfig config>
struct Scoring {
  static constexpr Features features = config.features;
  static constexpr Type type = product_type<config>;
  static constexpr int panel = StageTile::panel_bytes;
  using Element = ptx::Element<features.dtype>;
  using Scores = float[mla_block_kv / 8][4];

  const AttentionArgs& args;
  SharedStorage<config>& shared;

  /// The factors from scores to exponents of two, for the two rows of a thread.
  using Scales = float[2];
  __device__ __forceinline__ void get_scales(Scales& scales) const {
    const Place place;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      scales[half] = tile::log2_e;
      if constexpr (!tile::Score<features>::linear) continue;
      scales[half] *= args.scale * (features.kv_scales ? shared.k_scale : 1.0f);
      if constexpr (divides_Q<config>) scales[half] *= shared.Q_factor[place.row + 8 * half];
    }
  }

  /// Loads Q of the current item; rows that do not exist become zero.
  __device__ __forceinline__ void load_Q() const {
    const decode::Item<config>& item = shared.cursor.item;
    const tile::Sequence sequence = tile::make_sequence<features>(args, item.batch_idx);
    if (threadIdx.x == 0) {
      const decode::Tokens tokens = decode::Item<config>::tokens_of(sequence, item.row_tile);
      shared.sequence = sequence;
      if constexpr (features.kv_scales) {
        const auto& scales = has_own_columns<config> ? args.K_scale : args.V_scale;
        shared.k_scale = tile::head_scale<features>(scales, item.batch_idx, item.kv_head_idx);
        shared.v_by_k_scale = tile::head_scale<features>(args.V_scale, item.batch_idx, item.kv_head_idx) / shared.k_scale;
      }
      shared.seen_by_all =
          tile::Visibility<features>(args, sequence, item.kv_head_idx * config.group).keys_of_all(tokens.begin, tokens.end);
    }
    const Place place;
    constexpr int chunks = mla_columns / 8;  // of a row, which a warp copies; those that do not exist become zero
#pragma unroll 1
    for (int row = place.thread / 32; row < mla_block_q; row += 2 * wg_threads / 32) {
      const int packed = item.first_row() + row, query = packed / config.group;
      const int head_idx = item.kv_head_idx * config.group + packed % config.group;
      const bool exists = packed < item.end_row(sequence.rows_q * config.group);
      const auto* from = tile::query_rows<const Element, features>(args.Q, sequence, head_idx).row(exists ? query : 0);
#pragma unroll
      for (int chunk = place.lane; chunk < chunks; chunk += 32) {
        const bool has_columns = exists && 8 * chunk < config.head_dim;
        ptx::copy_async(ptx::shared_address(&shared.Q) + StageTile::offset(row, chunk),
                        from + (has_columns ? 8 * chunk : 0), has_columns ? 16 : 0);
      }
    }
    ptx::copy_async_commit();
    ptx::copy_async_wait<0>();
    if constexpr (divides_Q<config>) divide_Q();
    ptx::fence_async_shared();                          // orders Q before the products' reads
    ptx::barrier_sync(barrier_attend, 2 * wg_threads);  // Q is ready for both warpgroups
  }

  /// Converts the rows of Q that this warp has copied to float16. Each row is divided by a power of two, so that its
  /// largest element is between 2^15 and 2^16. Elements that are smaller by 2^32 or more are rounded.
  __device__ __forceinline__ void divide_Q() const {
    using Chunk = ptx::Vector<unsigned, 4>;
    const Place place;
    constexpr int chunks = mla_columns / 8, each = (chunks + 31) / 32;
#pragma unroll 1
    for (int row = place.thread / 32; row < mla_block_q; row += 2 * wg_threads / 32) {
      const unsigned Q = ptx::shared_address(&shared.Q);
      Chunk values[each];
      unsigned largest = 0;
#pragma unroll
      for (int i = 0; i < each; ++i) {
        const int chunk = place.lane + 32 * i;
        if (chunk >= chunks) continue;
        values[i] = ptx::load_shared<Chunk>(Q + StageTile::offset(row, chunk));  // this lane has copied it
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          largest = tile::max(largest, tile::max(values[i][j] & 0x7fffu, values[i][j] >> 16 & 0x7fffu));
        }
      }
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        largest = tile::max(largest, static_cast<unsigned>(ptx::shuffle_xor(static_cast<int>(largest), step)));
      }
      // Both powers of two are normal numbers. Inf and NaN in a row are kept.
      const int exponent = tile::max(16, tile::min(static_cast<int>(largest >> 7), 254)) - 127 - 15;
      const auto power = [](int e) { return __builtin_bit_cast(float, (e + 127) << 23); };
      const float factor = power(-exponent);
#pragma unroll
      for (int i = 0; i < each; ++i) {
        const int chunk = place.lane + 32 * i;
        if (chunk >= chunks) continue;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          values[i][j] = ptx::pack<Type::float16>(ptx::unpack_low<Type::bfloat16>(values[i][j]) * factor,
                                                  ptx::unpack_high<Type::bfloat16>(values[i][j]) * factor);
        }
        ptx::store_shared(Q + StageTile::offset(row, chunk), values[i]);
      }
      if (place.lane == 0) shared.Q_factor[row] = power(exponent);
    }
  }

  /// Waits for a part of the columns of the KV block in this warpgroup's stage, and issues its products of S = Q K^T.
  template <int part>
  __device__ __forceinline__ void issue_part(Scores& S, int parity) const {
    auto& flat = reinterpret_cast<float(&)[mla_block_kv / 2]>(S);
    const Place place;
    ptx::mbarrier_wait(shared.full[place.warpgroup][part], parity);
    if constexpr (gathers<config>) ptx::fence_async_shared();  // orders the copies before the products
    if constexpr (features.kv_scales && part == own_part) {
      // The shuffle tells the compiler that this is uniform. Usually keys and values have the same scale, and nothing is
      // done.
      if (ptx::shuffle(static_cast<int>(shared.v_by_k_scale != 1.0f), 0) != 0) scale_values(flat);
    }
    // Descriptors belong in uniform registers, where adding a step is free; a shuffle puts them there. The compiler removes
    // a shuffle of a value that it knows to be uniform. So the lane is added, which is 0 in lane 0.
    const Descriptor Q(ptx::wgmma_descriptor(shared.Q.bytes + 16 * place.lane, 0, 1024));
    const Descriptor K(ptx::wgmma_descriptor(&shared.stage[place.warpgroup], 0, 1024));
    ptx::wgmma_fence();  // softmax is done with these registers
#pragma unroll
    for (int step = 0; step < (part == own_part ? 1 : panels_of_part) * 4; ++step) {
      const int at = (part * panels_of_part + step / 4) * panel + step % 4 * 32;
      ptx::wgmma_ss<type, mla_block_kv, ptx::Major::k, ptx::Major::k>(flat, Q.at(at), K.at(at), part + step != 0);
    }
    ptx::wgmma_commit();
  }

  /// The parts after the first.
  __device__ __forceinline__ void issue_rest(Scores& S, int parity) const {
    issue_part<1>(S, parity);
    issue_part<2>(S, parity);
    issue_part<3>(S, parity);
    if constexpr (has_own_columns<config>) issue_part<own_part>(S, parity);
  }
  __device__ __forceinline__ void issue_all(Scores& S, int parity) const {
    issue_part<0>(S, parity);
    issue_rest(S, parity);
  }

  /// Scales S after the products of the value's columns and before those of the key's own columns, which have another
  /// scale.
  __device__ __forceinline__ void scale_values(float (&S)[mla_block_kv / 2]) const {
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(S);
    const float factor = shared.v_by_k_scale;
#pragma unroll
    for (float& score : S) score *= factor;
    ptx::wgmma_fence();  // the following products add to them
  }

  /// With lists: -inf for entries that are no keys.
  __device__ __forceinline__ void hide_missing(Scores& S, int parity) const {
    const Place place;
    ptx::mbarrier_wait(shared.marked[place.warpgroup], parity);
    const auto& listed = shared.listed[place.warpgroup];
    const unsigned low = listed[0] | static_cast<unsigned>(listed[1]) << 16;
    const unsigned high = listed[2] | static_cast<unsigned>(listed[3]) << 16;
    if ((low & high) == ~0u) {
      ptx::path<"decode/mla_sm90_lists whole tile">();
      return;
    }
    ptx::path<"decode/mla_sm90_lists part of a tile">();
#pragma unroll
    for (int n = 0; n < mla_block_kv / 8; ++n) {
      const unsigned keys = (n < 4 ? low : high) >> (8 * (n % 4) + place.column);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if ((keys >> (e % 2) & 1) == 0) S[n][e] = -tile::infinity;
      }
    }
  }

  /// Turns dot products into scores; -inf if hidden.
  __device__ __forceinline__ void modify(Scores& S, int tile_idx, int parity) const {
    const Place place;
    if constexpr ((features.kv_scales || divides_Q<config>)&&!tile::Score<features>::linear) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float factor = features.kv_scales ? shared.k_scale : 1.0f;
        if constexpr (divides_Q<config>) factor *= shared.Q_factor[place.row + 8 * half];
#pragma unroll
        for (auto& block : S) block[2 * half] *= factor, block[2 * half + 1] *= factor;
      }
    }
    if constexpr (features.key_list) return hide_missing(S, parity);
    const int kv_begin = tile_idx * mla_block_kv;
    if (kv_begin < shared.seen_by_all.begin || kv_begin + mla_block_kv > shared.seen_by_all.end) {
      ptx::path<"decode/mla_sm90 edge tile">();
      decode::score_rows<true>(S, args, shared.cursor.item, shared.sequence, place.row, kv_begin + place.column);
    } else if constexpr (!tile::Score<features>::linear) {
      ptx::path<"decode/mla_sm90 inner tile with options">();
      decode::score_rows<false>(S, args, shared.cursor.item, shared.sequence, place.row, kv_begin + place.column);
    } else {
      ptx::path<"decode/mla_sm90 inner tile">();
    }
  }
};

}  // namespace flash_attention::mla
