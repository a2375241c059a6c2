#pragma once

// Emulated: kernels/ptx/matrix.cuh.

#include "abi/config.h"
#include "ptx/warp.cuh"

namespace flash_attention::ptx {

template <int count>
inline void ldmatrix(unsigned (&tiles)[count], unsigned row, bool transposed) {
  emulator::MatrixMoveOperand operand{count, transposed, row, tiles};
  emulator::table->warp(emulator::WarpOp::ldmatrix, &operand);
}

inline void ldmatrix_x4(unsigned (&tiles)[4], unsigned row) { ldmatrix(tiles, row, false); }
inline void ldmatrix_x4_trans(unsigned (&tiles)[4], unsigned row) { ldmatrix(tiles, row, true); }

inline unsigned transpose_8x8(unsigned pair) {
  const int lane = static_cast<int>(threadIdx.x) % 32, column = lane / 4, row = 2 * (lane % 4);
  const unsigned first = shuffle(pair, 4 * row + column / 2), second = shuffle(pair, 4 * row + 4 + column / 2);
  return (first >> 16 * (column % 2) & 0xffff) | (second >> 16 * (column % 2) & 0xffff) << 16;
}

template <abi::Type type>
constexpr emulator::MatrixType matrix_type =
    type == abi::Type::float16 ? emulator::MatrixType::float16 : emulator::MatrixType::bfloat16;

inline void multiply(emulator::WarpOp op, emulator::MatrixType type, float* D, const unsigned* A, const unsigned* B) {
  emulator::MultiplyOperand operand{type, type, D, A, B};
  emulator::table->warp(op, &operand);
}

template <abi::Type type>
inline void mma_m16n8k16(float (&D)[4], const unsigned (&A)[4], const unsigned (&B)[2]) {
  static_assert(type != abi::Type::float32, "16-bit inputs; mma_m16n8k8_tf32 takes fp32");
  multiply(emulator::WarpOp::mma, matrix_type<type>, D, A, B);
}

inline void mma_m16n8k8_tf32(float (&D)[4], const unsigned (&A)[4], const unsigned (&B)[2]) {
  multiply(emulator::WarpOp::mma, emulator::MatrixType::tf32, D, A, B);
}

template <abi::Type type>
constexpr emulator::MatrixType code_type =
    type == abi::Type::e4m3 ? emulator::MatrixType::e4m3 : emulator::MatrixType::e5m2;

template <abi::Type a_type, abi::Type b_type>
inline void mma_m16n8k32(float (&D)[4], const unsigned (&A)[4], const unsigned (&B)[2]) {
  emulator::MultiplyOperand operand{code_type<a_type>, code_type<b_type>, D, A, B};
  emulator::table->warp(emulator::WarpOp::mma, &operand);
}

}  // namespace flash_attention::ptx
