#pragma once

// The gradients of the tensors that a program reads: sums of dS * d score / d element. Any number of scores may read an
// element. Terms are added as integers, so the sum is the same in any order. The first step finds the largest term of
// each tensor, which gives the unit in which no sum overflows. The second step adds, the third converts.

#include "cpu/backward/gradient.h"
#include "cpu/tile/program.h"

namespace flash_attention::cpu {
namespace {

struct ProgramScratch {
  GradientRows rows;
  GradientTile tile;
  alignas(64) float K[block_kv * max_head_dim];
  alignas(64) float V[block_kv * max_head_dim];
  alignas(64) float before[block_kv * block_q];
};

inline bool has_program_gradients(const Call& call) {
  return call.program != nullptr && call.program->gradient_limits != nullptr;
}

inline std::int64_t program_items(const Call& call) {
  if (!has_program_gradients(call) || call.program->gradients.instructions == nullptr) return 0;
  return call.batch * call.heads_q * ceil_div(call.seq_q, block_q);
}

/// Calls use(tensor, terms, places), a vector of scores each, for all terms of the rows of an item.
template <class Use>
inline void for_each_term(const Call& call, std::int64_t item, ProgramScratch& scratch, Use use) {
  const std::int64_t blocks = ceil_div(call.seq_q, block_q);
  RowBlock block(call, item / blocks / call.heads_q, static_cast<int>(item / blocks % call.heads_q), 1,
                 item % blocks * block_q);
  if (block.rows == 0) return;
  scratch.rows.load_rows(call, block);
  const ProgramView& program = *call.program;
  for (std::int64_t begin = block.key_begin; begin < block.key_end; begin += block_kv) {
    const Tile tile(call, block, begin);
    if (tile.seen == Seen::none) continue;
    const FloatRows K = key_rows(call, block, call.k, begin, tile.count, call.head_dim, false, scratch.K);
    const FloatRows V = key_rows(call, block, call.v, begin, tile.count, call.head_dim_v, false, scratch.V);
    scratch.tile.compute_after_program(call, block, tile, scratch.rows, K, V, nullptr, {.before = scratch.before});
    run_code(program, program.gradients, block.program_rows(), tile.begin, tile.count, scratch.before,
             [&](int v, int first, int keys, auto result) {
               const int lanes = smaller(block.rows - v * vector_lanes, vector_lanes);
               for (int key = 0; key < keys; ++key) {
                 const Vec ds = load(scratch.tile.dS + ((first + key) * block.vectors + v) * vector_lanes);
                 for (int n = 0; 2 * n < program.gradients.num_results; ++n) {
                   const Vec terms = through_softcap(ds, load(result(2 * n, key)));
                   use(program.gradient_tensors[n], lanes, terms, load_int(result(2 * n + 1, key)));
                 }
               }
             });
  }
}

/// Finds the largest term of each tensor; Inf if one is not finite.
inline void program_limits(const Call& call, std::int64_t item, void* memory) {
  float limits[program::max_tensors] = {};
  for_each_term(call, item, *static_cast<ProgramScratch*>(memory), [&](int tensor, int lanes, Vec terms, Int) {
    for (int lane = 0; lane < lanes; ++lane) {
      const float size = __builtin_fabsf(terms[lane]);
      if (!(size <= limits[tensor])) limits[tensor] = size <= 3.4e38f ? size : infinity;
    }
  });
  for (int tensor = 0; tensor < program::max_tensors; ++tensor) {
    float* limit = call.program->gradient_limits + tensor;
    float known;
    __atomic_load(limit, &known, __ATOMIC_RELAXED);
    while (limits[tensor] > known &&
           !__atomic_compare_exchange(limit, &known, &limits[tensor], true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
  }
}

/// The unit of a tensor's sums is 2^-shift: all terms together stay below 2^61.
inline int program_shift(const Call& call, float limit) {
  const double scores =
      static_cast<double>(call.batch * call.heads_q) * static_cast<double>(call.seq_q) * static_cast<double>(call.seq_kv);
  return 60 - __builtin_ilogb(limit) - __builtin_ilogb(scores < 1 ? 1.0 : scores);
}

inline void program_sums(const Call& call, std::int64_t item, void* memory) {
  double units[program::max_tensors];
  for (int tensor = 0; tensor < program::max_tensors; ++tensor) {
    const float limit = call.program->gradient_limits[tensor];
    units[tensor] = limit > 0 && limit < infinity ? __builtin_ldexp(1.0, program_shift(call, limit)) : 0;
  }
  for_each_term(call, item, *static_cast<ProgramScratch*>(memory), [&](int tensor, int lanes, Vec terms, Int places) {
    if (units[tensor] == 0) return;
    std::int64_t* sums = call.program->gradient_sums[tensor];
    for (int lane = 0; lane < lanes; ++lane) {
      if (terms[lane] == 0) continue;
      const std::int64_t term = __builtin_llrint(static_cast<double>(terms[lane]) * units[tensor]);
      __atomic_fetch_add(sums + places[lane], term, __ATOMIC_RELAXED);
    }
  });
}

inline std::int64_t program_tensor_items(const Call& call) {
  return has_program_gradients(call) ? program::max_tensors : 0;
}

inline void program_finish(const Call& call, std::int64_t tensor, void* /*scratch*/) {
  const ProgramView& program = *call.program;
  if (program.gradient_sums[tensor] == nullptr) return;
  const float limit = program.gradient_limits[tensor];
  const double unit = limit > 0 && limit < infinity ? __builtin_ldexp(1.0, -program_shift(call, limit)) : 0;
  for (std::int64_t n = 0; n < program.gradient_counts[tensor]; ++n) {
    const double sum = static_cast<double>(program.gradient_sums[tensor][n]) * unit;
    program.tensor_gradients[tensor][n] = limit < infinity ? static_cast<float>(sum) : __builtin_nanf("");
  }
}

}  // namespace
}  // namespace flash_attention::cpu
