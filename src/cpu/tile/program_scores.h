#pragma once

// A program on a tile of scores S[key][lane].

#include "cpu/tile/program.h"
#include "cpu/tile/tile.h"

namespace flash_attention::cpu {
namespace {

/// A bias or a program's score in units of log2(e): finite ones stay so.
FLASH_ATTENTION_INLINE Vec scaled_bias(Vec bias) {
  constexpr float largest = 2.3e38f;
  const Vec bounded = select(bias < -largest, splat(-largest), select(bias > largest, splat(largest), bias));
  return select(absolute(bias) == infinity, bias, bounded) * log2_e;
}

/// What backward keeps of a program's tile, each [key][lane]; either may be null.
struct ProgramTerms {
  float* slope = nullptr;   // the derivative of the new score by the old one
  float* before = nullptr;  // the old scores
};

/// S, in units of log2(e), becomes what the program makes of it.
inline void apply_score_program(const Call& call, const RowBlock& block, const Tile& tile, float* S, ProgramTerms terms) {
  const int size = tile.count * block.lanes();
  for (int i = 0; i < size; i += vector_lanes) {
    store(S + i, load(S + i) * ln_2);
    if (terms.before != nullptr) store(terms.before + i, load(S + i));
  }
  const Code& code = terms.slope != nullptr ? call.program->slope : call.program->score;
  run_code(*call.program, code, block, tile.begin, tile.count, S, [&](int v, int first, int keys, auto result) {
    for (int key = 0; key < keys; ++key) {
      const int at = ((first + key) * block.vectors + v) * vector_lanes;
      store(S + at, scaled_bias(load(result(0, key))));
      if (terms.slope != nullptr) store(terms.slope + at, load(result(1, key)));
    }
  });
}

/// Hides what the program does not show.
inline void apply_mask_program(const Call& call, const RowBlock& block, const Tile& tile, float* S) {
  run_code(*call.program, call.program->visible, block, tile.begin, tile.count, S,
           [&](int v, int first, int keys, auto result) {
             for (int key = 0; key < keys; ++key) {
               float* s = S + ((first + key) * block.vectors + v) * vector_lanes;
               store(s, select(load_int(result(0, key)), load(s), splat(-infinity)));
             }
           });
}

}  // namespace
}  // namespace flash_attention::cpu
