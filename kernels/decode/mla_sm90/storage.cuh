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
/// The parts of a stage: panels 0 to 3 and panels 4 to 7, the values; panel 8, the key's own columns, if it has any.
constexpr int most_parts = 3;
template <ForwardConfig config>
constexpr int parts_of_stage = config.head_dim > config.head_dim_v ? most_parts : 2;
constexpr int value_panels = mla_head_dim_v / 64;
constexpr int panels_of_half = value_panels / 2;

// Named barriers of the block.
constexpr int barrier_attend = 1;     // both consumer warpgroups
constexpr int barrier_P = 2;          // P of an even KV block is ready; 3: of an odd one
constexpr int barrier_warpgroup = 4;  // one warpgroup; 5: the other

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
  float max[2][mla_block_q];           // after an even and after an odd KV block; in units of scores
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
  unsigned listed[mla_stages][2];      // with lists: a bit for each entry of the stage that is a key
  tile::Sequence sequence;
  tile::KeyRange seen_by_all;

  /// The number of KV blocks of the item, from the cursor on, that this thread block processes.
  __device__ __forceinline__ int count() const {
    return tile::min(cursor.item.end_tile - cursor.tile, run.end - run.begin - done);
  }
};

/// A descriptor that is computed again for each KV block and is uniform in a warp.
using Descriptor = tile::Descriptor<true, true>;

}  // namespace flash_attention::mla
