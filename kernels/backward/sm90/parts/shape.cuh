#pragma once

// The sizes of backward/sm90 that follow from its configuration.

#include "abi/args.h"
#include "abi/backward_sm90.h"
#include "abi/config.h"
#include "abi/tensor_maps.h"
#include "ptx/convert.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/wgmma.cuh"
#include "tile/math.cuh"
#include "tile/pipeline.cuh"
#include "tile/score.cuh"
#include "tile/workspace.cuh"

namespace flash_attention::backward_sm90 {

using namespace abi;

using namespace abi::backward_sm90_maps;

using Region = BackwardSm90Region;
using tile::workspace;

/// Counters of tasks taken, at Region::tasks.
enum Counter : int { counter_keys = 0, counter_queries = 1, num_counters = 2 };

constexpr int wg_threads = 128;

/// The thread's number in its warpgroup.
__device__ __forceinline__ int wg_thread() { return static_cast<int>(threadIdx.x) % wg_threads; }
/// The same, read again, so that nothing computed from it stays in registers.
__device__ __forceinline__ int fresh_thread() {
  return ptx::hide_from_compiler(static_cast<int>(threadIdx.x)) % wg_threads;
}
/// Whether this is the first thread of its warpgroup, which signals for the warpgroup.
__device__ __forceinline__ bool leads_warpgroup() { return threadIdx.x % wg_threads == 0; }

constexpr int tile_rows = 64;  // rows of every tile: the M of the products, and the q tile
constexpr int chunk_dim = 64;  // contiguous columns of a tile: 128 bytes, the width of the swizzle
constexpr int chunk_elements = tile_rows * chunk_dim;
constexpr int chunk_bytes = chunk_elements * 2;

/// The workspace has row statistics and the fp32 dQ as [heads_q, padded rows]. A sequence begins at a multiple of 4
/// rows (16 bytes of floats, which bulk copies need) and has room for whole tiles: the next one begins at least 64 rows
/// later.
__device__ __forceinline__ long long padded_start(const AttentionArgs& args, const tile::Sequence& sequence) {
  const long long start =
      args.cu_seqlens_q != nullptr ? sequence.start_q : static_cast<long long>(sequence.batch_idx) * args.seq_q;
  return (start + 68ll * sequence.batch_idx) / 4 * 4;
}
__device__ __forceinline__ long long padded_rows(const AttentionArgs& args) {
  return (args.total_q + 68ll * args.batch + 3) / 4 * 4;
}
/// The flags of the tile that begins at a padded row: a byte for each warp of prepare, after lse2. It is not 0 if the
/// warp found a row that is not finite, or may not be.
__device__ __forceinline__ unsigned* nonfinite_flags_of(const AttentionArgs& args, long long padded) {
  auto* const lse2 = workspace<float>(args, Region::lse2);
  return reinterpret_cast<unsigned*>(lse2 + padded_rows(args) * args.heads_q) + padded / tile_rows;
}
/// The workspace has the fp32 dK and dV as [heads_kv, padded keys]. A sequence has room for whole tiles.
template <BackwardConfig config>
__device__ __forceinline__ long long padded_key(const AttentionArgs& args, const tile::Sequence& sequence, int head_idx) {
  const long long start =
      config.features.packed ? sequence.start_kv : static_cast<long long>(sequence.batch_idx) * args.seq_kv;
  return head_idx * (args.total_kv + static_cast<long long>(config.block_kv) * args.batch) + start +
         config.block_kv * sequence.batch_idx;
}

/// Whether tasks share the queries of each head's first tile of keys. The workspace has its dK and dV as [batch,
/// heads_kv, block_kv].
template <BackwardConfig config>
__device__ __forceinline__ bool splits_first(const AttentionArgs& args) {
  return config.split_first && backward_sm90_first_parts(args.seq_q) > 1;
}
template <BackwardConfig config>
__device__ __forceinline__ long long first_keys_row(const AttentionArgs& args, const tile::Sequence& sequence,
                                                    int head_idx) {
  return (static_cast<long long>(sequence.batch_idx) * args.heads_kv + head_idx) * config.block_kv;
}

template <BackwardConfig config>
struct Shape {
  static constexpr Features features = config.features;
  static constexpr Type type = features.dtype;
  using Element = ptx::Element<type>;

  static constexpr int warpgroups = config.block_kv / tile_rows;  // that compute; one more loads
  static constexpr int threads = (warpgroups + 1) * wg_threads;
  static constexpr int stages = config.num_stages;

  // Columns past the head dimension read as zero and are not stored, so tiles round up.
  static constexpr int chunks = tile::ceil_div(config.head_dim, chunk_dim);
  static constexpr int chunks_v = tile::ceil_div(config.head_dim_v, chunk_dim);
  static constexpr int steps = tile::ceil_div(config.head_dim, 16);  // of a product that contracts the head dimension
  static constexpr int steps_v = tile::ceil_div(config.head_dim_v, 16);
  static constexpr int width = tile::round_up(config.head_dim, 32);  // N of dK and dQ
  static constexpr int width_v = tile::round_up(config.head_dim_v, 32);

  static constexpr int tiles_bytes = (chunks + chunks_v) * chunk_bytes;  // of a stage: Q and dO
  static constexpr int kv_bytes = warpgroups * (chunks + chunks_v) * chunk_bytes;

  // setmaxnreg: the other warpgroups take the registers that the producer warpgroup gives up (3 x 168 or 4 x 128 a
  // thread at entry). If masks choose the steps, the producer warp has more to do and keeps more.
  static constexpr bool listed = tile::TileMap<features>::present;
  static constexpr int load_registers = warpgroups == 3 ? 32 : listed ? 40 : 24;
  static constexpr int work_registers = warpgroups == 3 ? 160 : listed ? 232 : 240;

  // Rows of Q and dO past the last query may belong to another sequence, or hold anything: products must not read them.
  static constexpr bool next_sequence_rows = features.packed || features.seqused_q;

  // Tasks add to the sums in memory in a fixed order, so every run has the same bits (ordered_sums.cuh).
  static constexpr bool ordered = config.dq_mode == DqMode::ordered;

  // A second kernel computes dQ, without sums in memory and without exchange of dS between warpgroups.
  static constexpr bool separate_dq = config.dq_mode == DqMode::separate_kernel;
  // If some scores may be hidden, a key that is not finite must not be multiplied by their zeros. Tasks of few steps
  // skip the check if no score can be hidden.
  static constexpr bool checks_keys =
      !separate_dq && (!config.interleave_heads || features.hides_keys() || features.dropout || features.packed ||
                       features.seqused_q || features.seqused_kv || features.key_lengths);

  // One tile has all keys of a head. Then its tasks also do the work of prepare, convert and repair.
  static constexpr bool direct_dq = config.dq_mode == DqMode::direct;

  static_assert(config.loop.overlap != Overlap::pairs || (warpgroups == 2 && !separate_dq && !direct_dq));
  // Under a causal mask the second warpgroup sees nothing of a task's first step (of the first head). So the first
  // warpgroup owns that step, and the second skips it.
  static constexpr bool skips_first_step = config.loop.overlap == Overlap::pairs && features.window_right;

  static_assert(config.block_kv % tile_rows == 0);  // except in sm80_dbias/kernel.cuh, which uses this Shape, too
};

/// The same sequence, hidden from the compiler, so that it keeps nothing that it can compute again: registers are short
/// in these loops.
__device__ __forceinline__ tile::Sequence fresh_sequence(tile::Sequence sequence) {
  sequence.batch_idx = ptx::hide_from_compiler(sequence.batch_idx);
  return sequence;
}

using tile::PipelineState;

/// The swizzled address of 16 bytes: `piece` (8 columns) of a row in a chunk.
__device__ __forceinline__ unsigned swizzled(unsigned chunk_address, int row, int piece) {
  return chunk_address + row * 128 + ((piece ^ (row & 7)) * 16);
}

}  // namespace flash_attention::backward_sm90
