#pragma once

// Applies a program to a tile: hides keys, and changes the scores S[key][lane].

#include "cpu/tile/element.h"
#include "cpu/tile/program.h"

namespace flash_attention::cpu {
namespace {

inline void hide_by_program(const ProgramView& program, const ProgramRows& rows, std::int64_t begin, int count,
                            std::uint32_t* bits, int stride) {
  run_code(program, program.visible, rows, begin, count, nullptr, [&](int v, int first, int keys, auto result) {
    static_assert(32 % program_keys == 0);
    auto* words = reinterpret_cast<std::int32_t*>(bits + first / 32 * stride + v * vector_lanes);
    Int hidden{};
    for (int key = 0; key < keys; ++key)
      hidden |= ~load_int(result(0, key)) & static_cast<std::int32_t>(1u << (first + key) % 32);
    *reinterpret_cast<IntInMemory*>(words) = load(words) & ~hidden;
  });
}

inline void change_by_program(const ProgramView& program, const ProgramRows& rows, std::int64_t begin, int count, float* S,
                              ProgramTerms terms) {
  for (int i = 0; i < count * rows.lanes; i += vector_lanes) {
    store(S + i, load(S + i) * ln_2);
    if (terms.before != nullptr) store(terms.before + i, load(S + i));
  }
  const Code& code = terms.slope != nullptr ? program.slope : program.score;
  run_code(program, code, rows, begin, count, S, [&](int v, int first, int keys, auto result) {
    for (int key = 0; key < keys; ++key) {
      const int at = (first + key) * rows.lanes + v * vector_lanes;
      store(S + at, scaled_bias(load(result(0, key))));
      if (terms.slope != nullptr) store(terms.slope + at, load(result(1, key)));
    }
  });
}

}  // namespace
}  // namespace flash_attention::cpu
