#pragma once

// The products of pairs.h with an instruction that multiplies pairs lane by lane (dot_pairs): the register tile of
// multiply.h, and the dots of decode.h.

#include "cpu/generic/decode.h"
#include "cpu/generic/pairs.h"

namespace flash_attention::cpu {
namespace {

struct DotProducts {
  static constexpr int row_unit = tile_rows;
  static constexpr int depth_unit = 2;
  static void begin() {}
  static void end() {}
  static FLASH_ATTENTION_INLINE Short round(Vec x) { return round_to_bfloat16(x); }
  static FLASH_ATTENTION_INLINE Vec pair(Vec low, Vec high) { return round_to_pair(low, high); }

  struct Pair {
    using Left __attribute__((may_alias, aligned(2))) = float;
    using Stored = float;
    static FLASH_ATTENTION_INLINE Vec load(const float* from) { return cpu::load(from); }
    static FLASH_ATTENTION_INLINE Vec multiply_add(Vec sum, Vec a, Vec b) { return dot_pairs(sum, a, b); }
  };

  template <Start start>
  static void multiply(const PairProduct& product) {
    cpu::multiply<start, Order::row_major, Pair>({.A = reinterpret_cast<const Pair::Left*>(product.A),
                                                  .a_stride = product.a_stride / 2,
                                                  .B = product.B,
                                                  .b_stride = product.b_stride,
                                                  .C = product.C,
                                                  .c_stride = product.c_stride,
                                                  .rows = product.rows,
                                                  .depth = product.depth / 2,
                                                  .vectors = product.lanes / vector_lanes});
  }
};

/// How decode multiplies rows of bfloat16: as they are.
struct PairDots {
  using Element = Bfloat16;
  static constexpr int columns = 2 * vector_lanes;
  static const float* query(const DecodeHead& head) { return head.Q_raw; }
  static FLASH_ATTENTION_INLINE Vec load_row(const Half* from) { return *reinterpret_cast<const VecInMemory*>(from); }
  static FLASH_ATTENTION_INLINE Vec add(Vec sum, Vec key, Vec query) { return dot_pairs(sum, key, query); }
  static void copy_query(const Half* from, int head_dim, float* to) {
    for (int c = 0; c < head_dim; c += vector_lanes) {
      store_halves(reinterpret_cast<Half*>(to) + c, load_halves(from + c, head_dim - c));
    }
  }
};

}  // namespace
}  // namespace flash_attention::cpu
