#pragma once

#include "abi/mla.h"
#include "decode/merge.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/wgmma.cuh"
#include "tile/descriptor.cuh"
#include "tile/pipeline.cuh"

// The shared memory of decode/mla_sm90, and who waits for whom.

namespace flash_attention::mla {

using namespace abi;

constexpr int wg_threads = 128;
constexpr int parts_of_stage = 3;  // panels 0 to 3 and 4 to 7, the values; panel 8, the key's own columns
constexpr int value_panels = mla_head_dim_v / 64;
constexpr int panels_of_half = value_panels / 2;

// Named barriers of the block.
constexpr int barrier_attend = 1;     // both warpgroups that attend
constexpr int barrier_P = 2;          // P of an even KV block is ready; 3: of an odd one
constexpr int barrier_warpgroup = 4;  // one warpgroup; 5: the other

/// Of the products. Codes become float16 whatever the type of Q is: one instruction a pair, where bfloat16 takes four.
template <ForwardConfig config>
constexpr Type product_type = is_narrow(key_type(config.features)) ? Type::float16 : config.features.dtype;

/// Rows of Q become float16, too, each divided by a power of two.
template <ForwardConfig config>
constexpr bool divides_Q = product_type<config> != config.features.dtype;

/// Probabilities are multiplied by 2^log2_P_scale then: small ones keep their bits in float16.
template <ForwardConfig config>
constexpr int log2_P_scale = divides_Q<config> ? 15 : 0;

using StageTile = tile::SwizzledTile<mla_block_kv, mla_head_dim>;

template <ForwardConfig config>
struct SharedStorage {
  union {
    StageTile Q;
    typename decode::FinishRows<config>::SharedStorage finish;  // at the end of an item, which needs no Q
  };
  StageTile stage[mla_stages];  // K; its first panels are V, and its last one becomes P
  ptx::Mbarrier full[mla_stages][parts_of_stage];
  ptx::Mbarrier empty[mla_stages][2];  // by each warpgroup that attends
  float max[2][mla_block_q];           // after a KV block, by whether it is odd; in units of scores
  float rescale[2][mla_block_q];       // by which it rescales earlier sums
  float sum[2][mla_block_q];           // of each warpgroup's probabilities
  int not_finite[mla_block_q];         // rows that 0 * NaN has reached
  float lse[mla_block_q];              // of those
  float Q_factor[mla_block_q];         // by which rows of Q were divided, where they are
  decode::Cursor<config> cursor;       // the item that is worked on
  decode::Run<config> run;             // read now and then: no place for registers
  float k_scale;                       // of 8-bit keys: that of the columns after the value
  float v_by_k_scale;                  // and how many times as large that of the values is
  int done;                            // KV blocks of the run before it
  tile::Sequence sequence;
  tile::KeyRange seen_by_all;

  /// KV blocks of the item that this block has from the cursor on.
  __device__ __forceinline__ int count() const {
    return tile::min(cursor.item.end_tile - cursor.tile, run.end - run.begin - done);
  }
};

/// Computed anew for each KV block, and known to be the same in all lanes.
using Descriptor = tile::Descriptor<true, true>;

}  // namespace flash_attention::mla
