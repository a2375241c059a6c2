#pragma once

// Sizes of forward/sm90_fp8 that follow from its configuration, and its shared memory.

#include "abi/forward_sm90_fp8.h"
#include "abi/tensor_maps.h"
#include "forward/sm90/kv_loop.cuh"
#include "ptx/wgmma_fp8.cuh"

namespace flash_attention::forward_sm90_fp8 {

using namespace abi;
using forward_sm90::after;
using forward_sm90::Attempt;
using forward_sm90::barrier_all;
using forward_sm90::barrier_attend;
using forward_sm90::barrier_pingpong;
using forward_sm90::barrier_warpgroup;
using forward_sm90::block_at;
using forward_sm90::Blocks;
using forward_sm90::blocks_of;
using forward_sm90::load_biases;
using forward_sm90::NextBlocks;
using forward_sm90::pingpong_begin;
using forward_sm90::pingpong_end;
using forward_sm90::pingpong_signal;
using forward_sm90::pingpong_wait;
using forward_sm90::q_state;
using forward_sm90::release;
using forward_sm90::release_biases;
using forward_sm90::release_queries;
using forward_sm90::Schedule;
using forward_sm90::score_math;
using forward_sm90::ScoreMath;
using forward_sm90::sees_interior;
using forward_sm90::skip_blocks;
using forward_sm90::sync;
using forward_sm90::Tile;
using forward_sm90::take_biases;
using forward_sm90::tile_of;
using forward_sm90::tile_stages;
using forward_sm90::wg_rows;
using forward_sm90::wg_threads;
using forward_sm90::Work;
using forward_sm90::work_of;
using tile::PipelineState;

using namespace abi::forward_sm90_fp8_maps;

constexpr int chunk_dim = 128;   // adjacent columns of Q and K: 128 bytes
constexpr int o_chunk_dim = 64;  // of O, in 16 bits

template <ForwardConfig config>
struct Shape {
  static constexpr Features features = config.features;
  static constexpr Type type = features.dtype;     // of O
  static constexpr Type code = features.kv_dtype;  // of Q, K and V
  using Element = ptx::Element<type>;

  static constexpr int block_q = config.block_q;
  static constexpr int block_kv = config.block_kv;
  static constexpr int stages = config.num_stages;
  static constexpr int warpgroups = block_q / wg_rows;            // consumers; one more is the producer
  static constexpr int row_groups = warpgroups;                   // of 64 query rows: each warpgroup has its own
  static constexpr bool mask_words = false, makes_words = false;  // it takes no masks
  static constexpr bool wide = false;
  static constexpr bool uniform_by_vote = false;
  static constexpr int threads = (warpgroups + 1) * wg_threads;
  // H200, 2048 keys of 128 columns, 192 x 96, TFLOP/s full / causal: with ping-pong 818 / 649, without 851 / 695.
  static constexpr bool pingpong = warpgroups > 1 && config.head_dim_v <= (warpgroups == 3 ? 64 : 128);

  static constexpr int chunks = tile::ceil_div(config.head_dim, chunk_dim);
  static constexpr int steps_qk = tile::ceil_div(config.head_dim, 32);
  static constexpr int steps_pv = block_kv / 32;
  static constexpr int width_v = tile::round_up(config.head_dim_v, 32);
  static constexpr int o_chunks = tile::ceil_div(width_v, o_chunk_dim);
  static constexpr int bias_stages = config.bias_stages;  // of biases by TMA: forward/sm90/bias_tiles.cuh
  static constexpr int v_chunk = forward_sm90_fp8_v_chunk(block_kv);
  static constexpr int v_chunks = block_kv / v_chunk;
  static constexpr bool packed_values = forward_sm90_fp8_packed_values(features);  // V^T

  static constexpr int q_bytes = wg_rows * chunks * chunk_dim;  // of one warpgroup
  static constexpr int k_bytes = block_kv * chunks * chunk_dim;
  static constexpr int v_bytes = block_kv * width_v;
  static constexpr int q_stages = forward_sm90_fp8_layout(config).q_stages;

  // The tensor core keeps about 14 bits of a sum (ptx/wgmma_fp8.cuh). With each instruction of 32 keys it truncates, and
  // loses half of the last bit on average. So after this many blocks its sums are added to those in fp32; by then they are
  // too small by a factor of 1 - 2^-9.4. H200, 16384 keys, TFLOP/s full / causal: after 1536 keys 1015 / 976, after 768
  // keys 978 / 945.
  static constexpr int flush_blocks = tile::max(1, forward_sm90_fp8_sum_keys / block_kv);
  static constexpr bool keeps_sums = forward_sm90_fp8_keeps_sums(config);

  // setmaxnreg: a thread begins with 168 registers if there are two consumer warpgroups, with 128 if there are three. Warps
  // that transpose V have as many as the one that loads.
  static constexpr bool transposes_late = config.transposes_late;
  static constexpr int load_registers = warpgroups == 3 ? (transposes_late ? 56 : 32)
                                        : !transposes_late  ? 24
                                        : keeps_sums    ? 56
                                                        : 40;
  static constexpr int attend_registers =
      warpgroups == 3 ? (transposes_late ? 152 : 160) : 240 - (load_registers - 24) / 2;

  __device__ __forceinline__ static constexpr int row_group(int warpgroup) { return warpgroup; }

  static_assert(features.narrow_queries && (code == Type::e4m3 || code == Type::e5m2) && type != Type::float32);
  static_assert(!features.token_scales && !features.dropout && !features.mask);
  static_assert(config.head_dim <= 256 && config.head_dim_v <= 256 && block_q % wg_rows == 0);
  static_assert(ptx::wgmma_fp8_has_shape(block_kv) && ptx::wgmma_fp8_has_shape(width_v));
  static_assert((warpgroups == 2 || warpgroups == 3) && config.num_warps * 32 == threads);
};

template <ForwardConfig config>
struct alignas(1024) SharedStorage : forward_sm90::BiasTiles<config> {
  using S = Shape<config>;

  // Rows of 128 bytes, or of V^T v_chunk, whose 16-byte pieces are swizzled by the row.
  unsigned char Q[S::q_stages][S::warpgroups][S::chunks][wg_rows * chunk_dim];
  unsigned char K[S::stages][S::chunks][S::block_kv * chunk_dim];
  unsigned char V[S::stages][S::v_chunks][S::width_v * S::v_chunk];
  // The sums in fp32, separate for each thread if there is room; at the end of a tile, O before its store.
  unsigned char O[S::warpgroups][wg_rows * S::width_v * (S::keeps_sums ? 4 : 2)];

  ptx::Mbarrier Q_full[S::q_stages][S::warpgroups], Q_empty[S::q_stages][S::warpgroups];
  ptx::Mbarrier K_full[S::stages], K_empty[S::stages];
  ptx::Mbarrier V_full[S::stages], V_empty[S::stages];
  ptx::Mbarrier bias_full[S::bias_stages > 0 ? S::bias_stages : 1][S::bias_stages > 0 ? S::warpgroups : 1];
  ptx::Mbarrier bias_empty[S::bias_stages > 0 ? S::bias_stages : 1][S::bias_stages > 0 ? S::warpgroups : 1];
  Tile tiles[tile_stages];  // valid when Q_full completes
};

template <ForwardConfig config>
constexpr bool fits_layout = sizeof(SharedStorage<config>) == forward_sm90_fp8_layout(config).shared_bytes &&
                             sizeof(SharedStorage<config>) <= 232448;

}  // namespace flash_attention::forward_sm90_fp8
