#pragma once

// The idea:  blocks of queries do not need each other: every core takes the next one until none is left.
// From c2:   the three outer loops become an index; each thread has its own scratch memory.
// It buys:   the other cores.
// The limit: what cpu/prefill has beyond this: masks only where needed, packing by vectors, grouped heads in one block.

#include "cpu/ladder/rows.h"
#include "cpu/tile/element.h"
#include "cpu/tile/math.h"

namespace flash_attention::cpu {
namespace {
namespace c3_threads {

constexpr int max_dim = 128, vectors = block_q / vector_lanes;

struct Scratch {
  alignas(64) float Qt[max_dim][block_q];  // Q of a block, transposed, times scale * log2(e): exponentials are powers of 2
  alignas(64) float Ot[max_dim][block_q];
  alignas(64) float S[block_kv][block_q];
  alignas(64) float row_max[block_q], row_sum[block_q];
  alignas(64) std::int32_t visible[block_q];  // keys that a lane sees of the tile
};

/// C[row][lane] += sum over k of A[row * row_step + k * k_step] * B[k][lane]. An element of A is loaded once and multiplied
/// with a vector for each 16 queries; the sums of `rows` rows stay in registers for all of k.
template <int rows>
inline void multiply_rows(const float* A, std::int64_t row_step, std::int64_t k_step, const float (*B)[block_q], int depth,
                          float (*C)[block_q]) {
  Vec sum[rows][vectors];
  FLASH_ATTENTION_UNROLL
  for (int r = 0; r < rows; ++r) {
    FLASH_ATTENTION_UNROLL
    for (int v = 0; v < vectors; ++v) sum[r][v] = load(C[r] + v * vector_lanes);
  }
  for (int k = 0; k < depth; ++k) {
    Vec b[vectors];
    FLASH_ATTENTION_UNROLL
    for (int v = 0; v < vectors; ++v) b[v] = load(B[k] + v * vector_lanes);
    FLASH_ATTENTION_UNROLL
    for (int r = 0; r < rows; ++r) {
      const Vec a = splat(A[r * row_step + k * k_step]);
      FLASH_ATTENTION_UNROLL
      for (int v = 0; v < vectors; ++v) sum[r][v] += a * b[v];
    }
  }
  FLASH_ATTENTION_UNROLL
  for (int r = 0; r < rows; ++r) {
    FLASH_ATTENTION_UNROLL
    for (int v = 0; v < vectors; ++v) store(C[r] + v * vector_lanes, sum[r][v]);
  }
}

inline void multiply(const float* A, std::int64_t row_step, std::int64_t k_step, const float (*B)[block_q], int depth,
                     float (*C)[block_q], int rows) {
  int r = 0;
  for (; r + tile_rows <= rows; r += tile_rows) {
    multiply_rows<tile_rows>(A + r * row_step, row_step, k_step, B, depth, C + r);
  }
  for (; r < rows; ++r) multiply_rows<1>(A + r * row_step, row_step, k_step, B, depth, C + r);
}

/// The online softmax of c1, a row a lane. Scores become probabilities in place; Ot is rescaled.
inline void softmax(Scratch& scratch, int keys, int dim) {
  FLASH_ATTENTION_UNROLL
  for (int v = 0; v < vectors; ++v) {
    const int lane = v * vector_lanes;
    const Vec old_max = load(scratch.row_max + lane);
    const Int visible = load(scratch.visible + lane);
    Vec new_max = old_max, sum{};
    for (int j = 0; j < keys; ++j) {
      const Vec s = select(j < visible, load(scratch.S[j] + lane), splat(-infinity));
      store(scratch.S[j] + lane, s);
      new_max = max(s, new_max);
    }
    const Vec origin = select(new_max == -infinity, Vec{}, new_max);  // a row that has seen nothing: 2^(-inf - 0) = 0
    for (int j = 0; j < keys; ++j) {
      const Vec p = exp2(load(scratch.S[j] + lane) - origin);
      store(scratch.S[j] + lane, p);
      sum += p;
    }
    const Vec rescale = exp2(old_max - origin);
    for (int d = 0; d < dim; ++d) store(scratch.Ot[d] + lane, load(scratch.Ot[d] + lane) * rescale);
    store(scratch.row_sum + lane, load(scratch.row_sum + lane) * rescale + sum);
    store(scratch.row_max + lane, new_max);
  }
}

/// A block of queries of one head.
inline void attend(const Call& call, std::int64_t batch_idx, std::int64_t head_idx, std::int64_t q_begin,
                   Scratch& scratch) {
  const int dim = call.head_dim;
  const HeadRows Q = head_rows(call.q, batch_idx, head_idx), O = head_rows(call.out, batch_idx, head_idx);
  const HeadRows K = head_rows(call.k, batch_idx, head_idx / call.group);
  const HeadRows V = head_rows(call.v, batch_idx, head_idx / call.group);
  const std::int64_t left = call.seq_q - q_begin;
  const int rows = static_cast<int>(left < block_q ? left : block_q);
  for (int lane = 0; lane < block_q; ++lane) {
    const float* q = Q[q_begin + (lane < rows ? lane : rows - 1)];  // lanes past the end repeat the last row
    for (int d = 0; d < dim; ++d) scratch.Qt[d][lane] = q[d] * call.scale * log2_e, scratch.Ot[d][lane] = 0;
    scratch.row_max[lane] = -infinity;
    scratch.row_sum[lane] = 0;
  }

  const std::int64_t last_key = visible_keys(call, q_begin + rows - 1);  // later rows see more keys, never fewer
  for (std::int64_t kv_begin = 0; kv_begin < last_key; kv_begin += block_kv) {
    const int keys = static_cast<int>(last_key - kv_begin < block_kv ? last_key - kv_begin : block_kv);
    for (int lane = 0; lane < block_q; ++lane) {
      const std::int64_t seen = visible_keys(call, q_begin + lane) - kv_begin;
      scratch.visible[lane] = static_cast<std::int32_t>(seen < keys ? seen : keys);
    }
    for (int j = 0; j < keys; ++j) {
      for (int lane = 0; lane < block_q; lane += vector_lanes) store(scratch.S[j] + lane, Vec{});
    }
    multiply(K[kv_begin], K.stride, 1, scratch.Qt, dim, scratch.S, keys);  // S = K Qt
    softmax(scratch, keys, dim);
    multiply(V[kv_begin], 1, V.stride, scratch.S, keys, scratch.Ot, dim);  // Ot += V^T P
  }

  for (int lane = 0; lane < rows; ++lane) {
    const float row_sum = scratch.row_sum[lane], factor = row_sum == 0 ? 0 : 1 / row_sum;
    for (int d = 0; d < dim; ++d) O[q_begin + lane][d] = scratch.Ot[d][lane] * factor;
    if (call.lse == nullptr) continue;
    call.lse[(batch_idx * call.heads_q + head_idx) * call.seq_q + q_begin + lane] =
        (scratch.row_max[lane] + __builtin_log2f(row_sum)) * ln_2;
  }
}

inline std::int64_t blocks_per_head(const Call& call) { return (call.seq_q + block_q - 1) / block_q; }

inline std::int64_t items(const Call& call) { return call.batch * call.heads_q * blocks_per_head(call); }

/// Called for every item, by whichever thread is free, with memory of that thread.
inline void attention(const Call& call, std::int64_t item, void* memory) {
  const std::int64_t block_idx = item % blocks_per_head(call), head = item / blocks_per_head(call);
  attend(call, head / call.heads_q, head % call.heads_q, block_idx * block_q, *static_cast<Scratch*>(memory));
}

}  // namespace c3_threads
}  // namespace
}  // namespace flash_attention::cpu
