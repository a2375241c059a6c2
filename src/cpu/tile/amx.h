#pragma once

// The products of pairs.h on the tile registers of AMX: 16 rows of A by 32 of its columns, 16 words by 16 lanes of B,
// two tiles by two. Tiles is simd/amx.h, or in a test a model of it.

#include "cpu/tile/pairs.h"

namespace flash_attention::cpu {
namespace {

template <class Tiles>
struct TileProducts {
  static constexpr int row_unit = 16;
  static constexpr int depth_unit = 32;
  static void begin() { Tiles::configure(); }
  static void end() { Tiles::release(); }
  static FLASH_ATTENTION_INLINE Short round(Vec x) { return Tiles::round(x); }
  static FLASH_ATTENTION_INLINE Vec pair(Vec low, Vec high) { return Tiles::pair(low, high); }

  /// One or two tiles each way, from row `row` and lane `lane` on; registers 0 to 3 hold C, 4 and 5 A, 6 and 7 B.
  template <Start start, int a_tiles, int b_tiles>
  static void multiply_square(const PairProduct& product, int row, int lane) {
    const std::int64_t a_bytes = 2 * product.a_stride, b_bytes = 4 * product.b_stride, c_bytes = 4 * product.c_stride;
    const Half* A = product.A + row * product.a_stride;
    const float* B = product.B + lane;
    const auto c_at = [&](int a, int b) { return product.C + (row + a * 16) * product.c_stride + lane + b * 16; };
    const auto begin = [&]<int tile>(int a, int b) {
      if constexpr (start == Start::zero) {
        Tiles::template zero<tile>();
      } else {
        Tiles::template load<tile>(c_at(a, b), c_bytes);
      }
    };
    begin.template operator()<0>(0, 0);
    if constexpr (b_tiles == 2) begin.template operator()<1>(0, 1);
    if constexpr (a_tiles == 2) begin.template operator()<2>(1, 0);
    if constexpr (a_tiles == 2 && b_tiles == 2) begin.template operator()<3>(1, 1);
    for (int k = 0; k < product.depth; k += 32, A += 32, B += 16 * product.b_stride) {
      Tiles::template load<4>(A, a_bytes);
      Tiles::template load<6>(B, b_bytes);
      Tiles::template multiply<0, 4, 6>();
      if constexpr (b_tiles == 2) {
        Tiles::template load<7>(B + 16, b_bytes);
        Tiles::template multiply<1, 4, 7>();
      }
      if constexpr (a_tiles == 2) {
        Tiles::template load<5>(A + 16 * product.a_stride, a_bytes);
        Tiles::template multiply<2, 5, 6>();
      }
      if constexpr (a_tiles == 2 && b_tiles == 2) Tiles::template multiply<3, 5, 7>();
    }
    Tiles::template store<0>(c_at(0, 0), c_bytes);
    if constexpr (b_tiles == 2) Tiles::template store<1>(c_at(0, 1), c_bytes);
    if constexpr (a_tiles == 2) Tiles::template store<2>(c_at(1, 0), c_bytes);
    if constexpr (a_tiles == 2 && b_tiles == 2) Tiles::template store<3>(c_at(1, 1), c_bytes);
  }

  template <Start start>
  static void multiply(const PairProduct& product) {
    static_assert(start != Start::rescale, "tiles cannot be multiplied by a row's factor");
    for (int row = 0; row < product.rows; row += 32) {
      for (int lane = 0; lane < product.lanes; lane += 32) {
        const bool one_a = row + 16 == product.rows, one_b = lane + 16 == product.lanes;
        if (one_a && one_b) {
          multiply_square<start, 1, 1>(product, row, lane);
        } else if (one_a) {
          multiply_square<start, 1, 2>(product, row, lane);
        } else if (one_b) {
          multiply_square<start, 2, 1>(product, row, lane);
        } else {
          multiply_square<start, 2, 2>(product, row, lane);
        }
      }
    }
  }
};

}  // namespace
}  // namespace flash_attention::cpu
