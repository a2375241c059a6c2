#pragma once

// All kernels of an instruction set, as the table that its object exports.

#include "cpu/backward/backward_decode.h"
#include "cpu/backward/dbias.h"
#include "cpu/backward/mass_terms.h"
#include "cpu/backward/program_gradient.h"
#include "cpu/decode/decode.h"
#include "cpu/ladder/c2_simd.h"
#include "cpu/ladder/c3_threads.h"
#include "cpu/listed/backward.h"
#include "cpu/prefill/standard.h"
#include "cpu/tangent/second.h"
#include "cpu/tile/program_scores.h"

namespace flash_attention::cpu {
namespace {

template <Vec function(Vec)>
inline void map(const float* from, float* to, std::int64_t count) {
  for (std::int64_t i = 0; i < count; i += vector_lanes) store(to + i, function(load(from + i)));
}

/// Uses a value, so that the compiler must compute it.
FLASH_ATTENTION_INLINE void use(Vec value) { __asm__ volatile("" : : "m"(value)); }

inline double multiply_add(std::int64_t rounds) {
  constexpr int chains = tile_rows * tile_vectors;
  Vec sum[chains];
  FLASH_ATTENTION_UNROLL
  for (int i = 0; i < chains; ++i) sum[i] = splat(static_cast<float>(i));  // equal chains would become one
  for (std::int64_t round = 0; round < rounds; ++round) {
    const Vec factor = splat(0.5f), addend = splat(static_cast<float>(round));
    FLASH_ATTENTION_UNROLL
    for (int repeat = 0; repeat < 8; ++repeat) {
      FLASH_ATTENTION_UNROLL
      for (int i = 0; i < chains; ++i) sum[i] = sum[i] * factor + addend;
    }
  }
  Vec total{};
  FLASH_ATTENTION_UNROLL
  for (int i = 0; i < chains; ++i) total += sum[i];
  use(total);
  return 2.0 * 8 * chains * vector_lanes * static_cast<double>(rounds);
}

inline void read(const void* from, std::int64_t bytes) {
  const float* values = static_cast<const float*>(from);
  Vec sum[4] = {};
  for (std::int64_t i = 0; i < bytes / 4; i += 4 * vector_lanes) {
    FLASH_ATTENTION_UNROLL
    for (int v = 0; v < 4; ++v) sum[v] += load(values + i + v * vector_lanes);
  }
  use(sum[0] + sum[1] + sum[2] + sum[3]);
}

constexpr std::size_t largest(std::size_t x, std::size_t y) { return x > y ? x : y; }

constexpr KernelTable make_table() {
  return {
      .prefill = {{copy_items, copy_keys}, {forward_items, prefill}, {merge_items, merge}, {mass_items, key_mass}},
      .decode = {{decode_items, decode_by_floats}, {merge_items, merge}},
      .backward = {{copy_items, copy_keys},
                   {mass_term_items, mass_terms},
                   {backward_items, backward},
                   {finish_backward_items, finish_backward},
                   {merge_dq_items, merge_dq},
                   {sink_items, finish_sink},
                   {dbias_items, dbias<>},
                   {program_items, program_limits},
                   {program_items, program_sums},
                   {program_tensor_items, program_finish}},
      .backward_decode = {{backward_items, backward_decode},
                          {merge_dq_items, merge_dq},
                          {sink_items, finish_sink},
                          {dbias_items, dbias<>}},
      .standard_forward = {{standard_items, standard_scores},
                           {standard_items, standard_softmax},
                           {standard_items, standard_values}},
      .standard_backward = {{standard_items, standard_score_gradients},
                            {standard_items, standard_dq},
                            {standard_key_items, standard_dkv},
                            {sink_items, finish_sink},
                            {dbias_items, dbias<>}},
      .tangent = {{tangent_items, tangent}},
      .second = {{tangent_items, second_rows},
                 {backward_items, second},
                 {finish_backward_items, finish_backward},
                 {sink_items, finish_sink},
                 {dbias_items, dbias<SecondBiasScratch>}},
      .listed = {{listed_items, forward_listed}},
      .listed_backward = {{backward_items, backward_listed},
                          {finish_listed_items, finish_backward},
                          {sink_items, finish_sink}},
      .ladder_simd = {{c2_simd::items, c2_simd::attention}},
      .ladder_threads = {{c3_threads::items, c3_threads::attention}},
      .program = {hide_by_program, change_by_program},
      .scratch_bytes = largest(largest(largest(sizeof(PrefillScratch), sizeof(DecodeScratch)),
                                       largest(sizeof(DbiasScratch), sizeof(ProgramScratch))),
                               largest(largest(sizeof(BackwardScratch), sizeof(BackwardDecodeScratch)),
                                       largest(largest(sizeof(MassScratch), sizeof(TangentScratch)),
                                               largest(sizeof(SecondScratch), sizeof(SecondBiasScratch))))),
      .block_q = block_q,
      .exp2 = map<exp2>,
      .tanh = map<tanh>,
      .multiply_add = multiply_add,
      .read = read,
  };
}

}  // namespace
}  // namespace flash_attention::cpu
