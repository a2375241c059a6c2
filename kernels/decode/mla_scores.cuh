#pragma once

#include "decode/mla_storage.cuh"
#include "decode/scores.cuh"

// S = Q K^T of decode/mla_sm90: Q of an item to shared memory, the product of a KV block, options and mask on its scores.

namespace flash_attention::mla {

/// A thread's place in its warpgroup, and in accumulators. Worked out where it is needed: kept, it would take registers.
struct Place {
  int thread, warpgroup, lane, warp;
  int row, column;  // the first of its two rows, and its first column in each block of 8

  __device__ __forceinline__ Place() {
    thread = ptx::registers_fresh(static_cast<int>(threadIdx.x));
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
  static constexpr Type type = features.dtype;
  static constexpr int panel = StageTile::panel_bytes;
  using Element = ptx::Element<type>;
  using Scores = float[mla_block_kv / 8][4];

  const AttentionArgs& args;
  SharedStorage<config>& shared;

  __device__ __forceinline__ float scale_log2() const {
    if constexpr (!tile::Score<features>::linear) return tile::log2_e;
    return args.scale * (features.kv_scales ? shared.k_scale : 1.0f) * tile::log2_e;
  }

  /// Q of the item that the cursor is at; rows that do not exist are zero.
  __device__ __forceinline__ void load_Q() const {
    const decode::Item<config>& item = shared.cursor.item;
    const tile::Sequence sequence = tile::make_sequence<features>(args, item.batch_idx);
    if (threadIdx.x == 0) {
      const decode::Tokens tokens = decode::Item<config>::tokens_of(sequence, item.row_tile);
      shared.sequence = sequence;
      if constexpr (features.kv_scales) {
        shared.k_scale = tile::head_scale<features>(args.K_scale, item.batch_idx, item.kv_head_idx);
        shared.v_by_k_scale = tile::head_scale<features>(args.V_scale, item.batch_idx, item.kv_head_idx) / shared.k_scale;
      }
      shared.seen_by_all =
          tile::Score<features>(args, sequence, item.kv_head_idx * config.group).keys_of_all(tokens.begin, tokens.end);
    }
    const Place place;
    constexpr int chunks = mla_head_dim / 8;
    using Chunk = ptx::Vector<unsigned, 4>;
#pragma unroll 6
    for (int index = place.thread; index < mla_block_q * chunks; index += 2 * wg_threads) {
      const int row = index / chunks, chunk = index % chunks, packed = item.row_tile * config.block_q + row;
      const int query = packed / config.group, head_idx = item.kv_head_idx * config.group + packed % config.group;
      Chunk values{};
      if (query < sequence.rows_q) {
        const auto* from = tile::query_rows<const Element, features>(args.Q, sequence, head_idx).row(query) + chunk * 8;
        values = ptx::load_readonly(reinterpret_cast<const Chunk*>(from));
      }
      ptx::store_shared(ptx::shared_address(&shared.Q) + StageTile::offset(row, chunk), values);
    }
    ptx::fence_async_shared();                          // the products read Q
    ptx::barrier_sync(barrier_attend, 2 * wg_threads);  // Q is ready for both warpgroups
  }

  /// Issues S = Q K^T of KV block n.
  __device__ __forceinline__ void issue_scores(Scores& S, int n) const {
    auto& flat = reinterpret_cast<float(&)[mla_block_kv / 2]>(S);
    const int stage = ptx::shuffle(Place().warpgroup, 0);  // known to be the same in a warp
    const Descriptor Q(ptx::wgmma_descriptor(&shared.Q, 0, 1024));
    const Descriptor K(ptx::wgmma_descriptor(&shared.stage[stage], 0, 1024));
#pragma unroll
    for (int step = 0; step < mla_head_dim / 16; ++step) {
      constexpr int steps = panels_of_half * 4;  // of a part
      if (step % steps == 0) {
        ptx::mbarrier_wait(shared.full[stage][step / steps], n / mla_stages % 2);
        ptx::wgmma_fence();  // softmax is done with these registers
      }
      if constexpr (features.kv_scales) {
        if (step == value_panels * 4) scale_values(flat);
      }
      const int at = step / 4 * panel + step % 4 * 32;
      ptx::wgmma_ss<type, mla_block_kv, ptx::Major::k, ptx::Major::k>(flat, Q.at(at), K.at(at), step != 0);
    }
    ptx::wgmma_commit();
  }

  /// Between the products of the values' columns and those of the key's own, which have another scale.
  __device__ __forceinline__ void scale_values(float (&S)[mla_block_kv / 2]) const {
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(S);
    const float factor = shared.v_by_k_scale;
#pragma unroll
    for (float& score : S) score *= factor;
    ptx::wgmma_fence();  // the products that follow add to them
  }

  /// Scores from dot products, -inf where hidden.
  __device__ __forceinline__ void modify(Scores& S, int tile_idx) const {
    if constexpr (features.kv_scales && !tile::Score<features>::linear) {
#pragma unroll
      for (auto& block : S) {
#pragma unroll
        for (float& score : block) score *= shared.k_scale;
      }
    }
    const Place place;
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
