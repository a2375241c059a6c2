#pragma once

// The shared memory of backward/sm90 for two and three warpgroups, and its named barriers.

#include "backward/sm90/parts/producer.cuh"

namespace flash_attention::backward_sm90 {

template <BackwardConfig config>
struct alignas(1024) SharedStorage : BiasTiles<config> {
  using S = Shape<config>;
  using Chunk = typename S::Element[chunk_elements];

  // Tiles are chunks of 64 columns; a chunk is rows of 128 bytes whose 16-byte pieces are swizzled by the row.
  Chunk K[S::warpgroups][S::chunks];
  Chunk V[S::warpgroups][S::chunks_v];
  Chunk Q[S::stages][S::chunks];
  Chunk dO[S::stages][S::chunks_v];
  Chunk dS[S::separate_dq ? 1 : S::warpgroups][S::separate_dq ? 1 : S::warpgroups];     // [step's owner][keys of warpgroup]
  float dQ[S::separate_dq ? 1 : S::warpgroups][4][S::separate_dq ? 4 : 16 * S::width];  // in flight to memory
  StatisticsTiles<S::stages, config.statistics_by_product> statistics;
  ptx::Mbarrier prepared;  // direct_dq: the statistics of a task are in memory
  ptx::Mbarrier full[S::stages], empty[S::stages], KV_full, KV_empty;
  ptx::Mbarrier dS_empty[S::warpgroups];                          // of three warpgroups
  ptx::Mbarrier dQ_full[S::warpgroups], dQ_empty[S::warpgroups];  // between them and their senders
  int dQ_step[S::warpgroups];  // whose dQ is in the staging buffer; no_step: there will be no more
  unsigned num_blocks;         // of the grid; here for the producer warp, which has no register for it
  Step step[steps_kept];
  bool nonfinite_rows[4 * S::warpgroups];       // direct_dq: a query that the warp prepared may not be finite
  unsigned nonfinite_lanes[S::warpgroups][4];   // keys with a NaN or Inf, of each warp: two bits for each
  WorkTile<config> work_tile[work_tiles_kept];  // here, not in registers, which are short
};

/// Named barriers; the last two are followed by one for each warpgroup.
enum Barrier : int { barrier_keys = 1, barrier_dS_written = 2, barrier_dS_read = 5 };

constexpr int no_step = -1;

}  // namespace flash_attention::backward_sm90
