#pragma once

#include "abi/forward_sm90_fp8.h"
#include "forward/sm90_fp8/transpose.cuh"
#include "ptx/atomic.cuh"
#include "ptx/fence.cuh"
#include "ptx/memory.cuh"
#include "ptx/path.cuh"
#include "ptx/registers.cuh"
#include "ptx/warp.cuh"
#include "tile/key_source.cuh"
#include "tile/sequence.cuh"
#include "tile/workspace.cuh"

// V^T for forward/sm90_fp8 in jobs of a warp: 64 keys of a head. transpose.cuh says what is written, and writes all of it
// at once, faster. Jobs serve keys in pages, and heads that are needed late (ForwardConfig::transposes_late): the first
// launch has the jobs of the heads that the first tiles need. Warps of the second launch that neither load nor attend take
// the others, while tiles of earlier heads are computed:
//
//     jobs = the next four of counter;  transpose them;  done[head] += 1 for each
//     the producer, before V of a tile: wait until done[head] is all jobs
//
// A warp that has taken a job waits for nothing, so all jobs are done whichever blocks run. A lane transposes 16 keys of 4
// columns: 4 x 4 bytes at a time. Of each key the lanes read 32 bytes, and of each column they store all places of the job.

namespace flash_attention::forward_sm90_fp8 {

constexpr int job_threads = abi::forward_sm90_fp8_job_threads;

template <abi::ForwardConfig config>
struct Transposition {
  static constexpr abi::Features features = config.features;
  static constexpr bool packed = abi::forward_sm90_fp8_packed_values(features);

  const abi::AttentionArgs& args;

  __device__ __forceinline__ int jobs_of_head() const {
    return static_cast<int>(abi::forward_sm90_fp8_jobs_of_head(args.seq_kv, config.block_kv));
  }
  __device__ __forceinline__ int num_heads() const { return args.heads_kv * args.batch; }
  /// Heads whose V the first launch transposes, for the second one.
  __device__ __forceinline__ int first_heads() const {
    return static_cast<int>(
        abi::forward_sm90_fp8_first_heads(config, args.seq_q, args.heads_kv, args.group, args.batch, gridDim.x));
  }
  __device__ __forceinline__ unsigned* progress() const {
    return tile::workspace<unsigned>(args, abi::ForwardSm90Fp8Region::progress);
  }

  /// A job, by a warp.
  __device__ __forceinline__ void run(int job, int lane) const {
    constexpr int keys_of_job = abi::forward_sm90_fp8_job_keys, lanes_of_column = keys_of_job / 16;
    const int jobs = jobs_of_head(), head = job / jobs, batch_idx = head / args.heads_kv;
    const int head_idx = head - batch_idx * args.heads_kv, first_key = (job - head * jobs) * keys_of_job;
    const tile::Sequence sequence = tile::make_sequence<features>(args, batch_idx);
    const int first_place = lane % lanes_of_column * 16, sixteen = first_key + first_place;
    if (sixteen >= tile::round_up(sequence.rows_kv, config.block_kv)) return;
    const long long places = abi::transposed_places(packed, args.batch, args.seq_kv, args.total_kv, config.block_kv);
    long long place = sixteen, row = head;
    if constexpr (packed) {
      place += abi::transposed_start(sequence.start_kv, batch_idx, config.block_kv);
      row = head_idx;
    }
    auto* const to = tile::workspace<unsigned char>(args, abi::ForwardSm90Fp8Region::transposed_V) +
                     row * config.head_dim_v * places + place;
    const auto V = tile::key_source<const unsigned char, features>(args, args.V, sequence, head_idx);
    const int stride = ptx::hide_from_compiler(static_cast<int>(V.stride));  // 64 bits would take registers
    const int visible = sequence.visible_kv - sixteen;
#pragma unroll 1
    for (int column = lane / lanes_of_column * 4; column < config.head_dim_v; column += 32 / lanes_of_column * 4) {
      // Only pages of visible keys may be looked up. 8 keys are in one page.
      const unsigned char *low = nullptr, *high = nullptr;
      if (visible > 0) low = V.row(sixteen) + column;
      if (features.paged && visible > 8) high = V.row(sixteen + 8) + column;
      transpose(low, high, stride, visible, to + column * places, places);
    }
  }

 private:
  /// 16 places of 4 columns. The first eight keys are those from `low` on, the others follow, in pages from `high` on.
  __device__ __forceinline__ static void transpose(const unsigned char* low, const unsigned char* high, int stride,
                                                   int visible, unsigned char* to, long long places) {
    unsigned words[16];  // four columns of each key, in the order of the places
    const unsigned char* from = low;
    // One key after another, so that each address takes one addition.
#pragma unroll
    for (int key = 0; key < 16; ++key, from += stride) {
      if (features.paged && key == 8) from = high;
      words[key % 8 / 2 * 4 + key / 8 * 2 + key % 2] =
          key < visible ? ptx::load_readonly(reinterpret_cast<const unsigned*>(from)) : 0u;
    }
    using Column = ptx::Vector<unsigned, 4>;
    Column columns[4];
    transpose_bytes(words, columns);
#pragma unroll
    for (int c = 0; c < 4; ++c, to += places) ptx::store_global(reinterpret_cast<Column*>(to), columns[c]);
  }
};

/// Waits until V of a head is transposed: called by the thread that loads it.
template <abi::ForwardConfig config>
__device__ __forceinline__ void wait_for_values(const abi::AttentionArgs& args, int head) {
  const Transposition<config> transposition{args};
  if (head < transposition.first_heads()) return;  // by the first launch
  const unsigned* const done = transposition.progress() + 1 + head;
  const auto jobs = static_cast<unsigned>(transposition.jobs_of_head());
#pragma unroll 1
  while (ptx::load_acquire(done) < jobs) {
  }
  ptx::fence_async_global();  // the copies that follow see what other warps have stored
}

/// The jobs that the first launch has left, by a warp of the second one.
template <abi::ForwardConfig config>
__device__ __forceinline__ void transpose_others(const abi::AttentionArgs& args, int lane) {
  constexpr int claim = 4;  // jobs at a time: the counter and the fences take as long as a job
  const Transposition<config> transposition{args};
  const int begin = transposition.first_heads() * transposition.jobs_of_head();
  int end = 0;
#pragma unroll 1
  while (begin < transposition.num_heads() * transposition.jobs_of_head()) {
    if (lane == 0) end = begin + claim + static_cast<int>(ptx::atomic_add(transposition.progress(), claim));
    end = ptx::shuffle(end, 0);
    const int jobs = transposition.num_heads() * transposition.jobs_of_head();
    if (end - claim >= jobs) break;
    ptx::path<"forward/sm90_fp8 V transposed under tiles">();
#pragma unroll 1
    for (int job = end - claim; job < end && job < jobs; ++job) {
      transposition.run(job, ptx::hide_from_compiler(lane));
    }
    ptx::fence_async_global();  // TMA of other blocks reads what this lane has stored
    __syncwarp();               // all lanes have stored
    const int mine = end - claim + lane;
    if (lane < claim && mine < jobs) {
      ptx::atomic_add_acq_rel(transposition.progress() + 1 + mine / transposition.jobs_of_head(), 1);
    }
  }
}

}  // namespace flash_attention::forward_sm90_fp8

namespace flash_attention {

/// The first launch: the jobs of head blockIdx.x. With transposes_late it also resets the progress of the later heads.
template <abi::ForwardConfig config>
__device__ __forceinline__ void forward_sm90_fp8_transpose_jobs(const abi::AttentionArgs& args) {
  using namespace forward_sm90_fp8;
  const Transposition<config> transposition{args};
  const int thread = static_cast<int>(threadIdx.x), head = static_cast<int>(blockIdx.x);
  if (config.transposes_late && blockIdx.y == 0) {
    unsigned* const progress = transposition.progress();
    for (int i = head * job_threads + thread; i <= transposition.num_heads();
         i += static_cast<int>(gridDim.x) * job_threads) {
      progress[i] = 0;
    }
  }
  const int jobs = transposition.jobs_of_head(), job = static_cast<int>(blockIdx.y) * (job_threads / 32) + thread / 32;
  if (job < jobs) transposition.run(head * jobs + job, thread % 32);
}

}  // namespace flash_attention
