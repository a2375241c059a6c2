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

// The shared memory and the barriers of decode/mla_sm90.

namespace flash_attention::mla {

using namespace abi;

constexpr int wg_threads = 128;
/// The parts of a stage, each filled by itself: four pairs of panels, the values; and panel 8, the key's own columns, if it
/// has any. Warpgroup w multiplies P by parts 2 w and 2 w + 1, and releases both.
constexpr int value_panels = mla_head_dim_v / 64;
constexpr int panels_of_part = mla_panels_of_part;
constexpr int value_parts = value_panels / panels_of_part;
constexpr int own_part = value_parts;
constexpr int most_parts = value_parts + 1;
template <ForwardConfig config>
constexpr bool has_own_columns = config.head_dim > config.head_dim_v;
constexpr int panels_of_half = value_panels / 2;

// Named barriers of the block.
constexpr int barrier_attend = 1;     // both consumer warpgroups
constexpr int barrier_P = 2;          // P of the KV block in stage 0 is ready; 3: of the one in stage 1
constexpr int barrier_warpgroup = 4;  // one warpgroup; 5: the other
constexpr int barrier_turn = 7;       // warpgroup 0 has issued its scores; warpgroup 1 issues its own

/// The type of the products' operands. 8-bit codes become float16 even if Q is bfloat16: that takes one instruction for two
/// codes instead of four.
template <ForwardConfig config>
constexpr Type product_type = is_narrow(key_type(config.features)) ? Type::float16 : config.features.dtype;

/// Whether Q becomes float16, too. Then each row is divided by a power of two.
template <ForwardConfig config>
constexpr bool divides_Q = product_type<config> != config.features.dtype;

/// If so, probabilities are multiplied by 2^log2_P_scale, so that small ones keep their bits in float16.
template <ForwardConfig config>
constexpr int log2_P_scale = divides_Q<config> ? 15 : 0;

/// Whether all of the producer's threads copy each part, row by row. Otherwise each of its warps loads a part, with TMA or in
/// codes.
template <ForwardConfig config>
constexpr bool gathers = !config.producer_warp && !is_narrow(key_type(config.features));

using StageTile = tile::SwizzledTile<mla_block_kv, mla_columns>;

template <ForwardConfig config>
struct SharedStorage {
  union {
    StageTile Q;
    typename decode::FinishRows<config>::SharedStorage finish;  // at the end of an item, when Q is not needed any more
  };
  StageTile stage[mla_stages];  // K; its first panels are V, and its last one becomes P
  ptx::Mbarrier full[mla_stages][most_parts];
  ptx::Mbarrier empty[mla_stages][2];  // for each consumer warpgroup
  ptx::Mbarrier marked[mla_stages];    // with lists: `listed` is written
  float max[2][mla_block_q];           // after the KV block of a stage; in units of scores
  float rescale[2][mla_block_q];       // factors of earlier sums
  float sum[2][mla_block_q];           // of each warpgroup's probabilities
  int not_finite[mla_block_q];         // rows that 0 * NaN has reached
  float lse[mla_block_q];              // of these rows
  float Q_factor[mla_block_q];         // divisors of the rows of Q
  decode::Cursor<config> cursor;       // the current item
  decode::Run<config> run;             // rarely read: not worth registers
  float k_scale;                       // with 8-bit keys: the scale of the columns after the value, or of all
  float v_by_k_scale;                  // the values' scale divided by it
  int done;                            // KV blocks of the run that are finished
  unsigned short listed[mla_stages][4];  // with lists: a bit for each entry of the stage that is a key
  tile::Sequence sequence;
  tile::KeyRange seen_by_all;

  /// The number of KV blocks of the item, from the cursor on, that this thread block processes.
  __device__ __forceinline__ int count() const {
    return tile::min(cursor.item.end_tile - cursor.tile, run.end - run.begin - done);
  }
};

/// The stage of a KV block, and the parity of the phase that fills it. The KV blocks of an item go to stages 0 and 1 in turn;
/// the first is in stage 0.
struct StageOfBlock {
  int stage = 0;
  int parities = 0;  // a bit for each stage

  __device__ __forceinline__ int parity() const { return parities >> stage & 1; }
  __device__ __forceinline__ void advance(bool ends_item) {
    parities ^= 1 << stage;
    stage = ends_item ? 0 : stage ^ 1;
  }
};

/// A descriptor that is computed again for each KV block and is uniform in a warp.
using Descriptor = tile::Descriptor<true, true>;

}  // namespace flash_attention::mla
