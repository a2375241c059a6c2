// The steps of a product are the same in every tile, whatever the compiler knows of its sizes: with `invariant` a row has
// the same bits in tiles of every shape. Compiled for an instruction set with a fused multiply-add, as the kernels are.

#if defined(__FMA__)
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "cpu/detect.h"

namespace flash_attention::cpu {
namespace {
constexpr int vector_lanes = 8;
constexpr int tile_rows = 4;
constexpr int tile_vectors = 3;
constexpr int block_q = 24;
constexpr int block_kv = 64;
constexpr int lane_multiple = vector_lanes;
constexpr bool only_bfloat16 = false;
}  // namespace
}  // namespace flash_attention::cpu

#include "cpu/simd/avx2.h"
//
#include "cpu/tile/rows.h"
//
#include "cpu/tile/multiply.h"

namespace flash_attention::cpu {
namespace {

struct Matrices {
  std::vector<float> A, B, C, factor;

  Matrices(int rows, int depth, int lanes) {
    std::mt19937 random(static_cast<unsigned>(100 * rows + 10 * depth + lanes));
    std::uniform_real_distribution<float> draw(0.5f, 2.0f);
    for (auto& [values, size] : {std::pair{&A, rows * depth}, {&B, depth * lanes}, {&C, rows * lanes}, {&factor, lanes}}) {
      for (int i = 0; i < size; ++i) values->push_back(draw(random));
    }
  }
};

/// What is meant: C * factor, rounded, then one multiply-add after the other.
std::vector<float> expected(const Matrices& m, int rows, int depth, int lanes) {
  std::vector<float> result;
  for (int row = 0; row < rows; ++row) {
    for (int lane = 0; lane < lanes; ++lane) {
      volatile float rescaled = m.C[row * lanes + lane] * m.factor[lane];  // nothing is contracted with it
      float sum = rescaled;
      for (int k = 0; k < depth; ++k) sum = std::fma(m.A[row * depth + k], m.B[k * lanes + lane], sum);
      result.push_back(sum);
    }
  }
  return result;
}

/// A tile whose sizes are all known to the compiler.
template <int rows, int vectors, int depth>
void check_tile() {
  constexpr int lanes = vectors * vector_lanes;
  Matrices m(rows, depth, lanes);
  const std::vector<float> want = expected(m, rows, depth, lanes);
  const Product<Float32> product{.A = m.A.data(),
                                 .a_stride = depth,
                                 .B = m.B.data(),
                                 .b_stride = lanes,
                                 .C = m.C.data(),
                                 .c_stride = lanes,
                                 .rows = rows,
                                 .depth = depth,
                                 .vectors = vectors,
                                 .factor = m.factor.data()};
  multiply_tile<rows, vectors, Start::rescale, Order::row_major>(product, m.A.data(), m.B.data(), m.C.data(),
                                                                 m.factor.data());
  EXPECT_EQ(m.C, want) << rows << " rows, " << vectors << " vectors, depth " << depth;
}

class Contraction : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!has_isa(CpuIsa::avx2)) GTEST_SKIP() << "this CPU has no AVX2";
  }
};

TEST_F(Contraction, IsTheSameWhereSizesAreKnown) {
  check_tile<1, 1, 1>();
  check_tile<1, 1, 2>();
  check_tile<2, 2, 1>();
  check_tile<4, 3, 1>();
  check_tile<4, 3, 3>();
}

TEST_F(Contraction, IsTheSameInTilesOfEveryShape) {
  for (const int rows : {1, 2, 3, 5, 8, 13}) {
    for (const int vectors : {1, 2, 3, 4, 7}) {
      for (const int depth : {1, 2, 17, 150}) {
        const int lanes = vectors * vector_lanes;
        Matrices m(rows, depth, lanes);
        const std::vector<float> want = expected(m, rows, depth, lanes);
        multiply<Start::rescale, Order::row_major>({.A = m.A.data(),
                                                    .a_stride = depth,
                                                    .B = m.B.data(),
                                                    .b_stride = lanes,
                                                    .C = m.C.data(),
                                                    .c_stride = lanes,
                                                    .rows = rows,
                                                    .depth = depth,
                                                    .vectors = vectors,
                                                    .factor = m.factor.data()});
        EXPECT_EQ(m.C, want) << rows << " rows, " << vectors << " vectors, depth " << depth;
      }
    }
  }
}

}  // namespace
}  // namespace flash_attention::cpu
#endif
