#pragma once

// Emulated: kernels/ptx/matrix.cuh.

#include "abi/config.h"

namespace flash_attention::ptx {

template <int count>
inline void ldmatrix(unsigned (&tiles)[count], unsigned row, bool transposed) {
  emulator::MatrixMoveOperand operand{count, transposed, row, tiles};
  emulator::table->warp(emulator::WarpOp::ldmatrix, &operand);
}

inline void ldmatrix_x4(unsigned (&tiles)[4], unsigned row) { ldmatrix(tiles, row, false); }
inline void ldmatrix_x4_trans(unsigned (&tiles)[4], unsigned row) { ldmatrix(tiles, row, true); }
inline void ldmatrix_x2(unsigned (&tiles)[2], unsigned row) { ldmatrix(tiles, row, false); }
inline void ldmatrix_x2_trans(unsigned (&tiles)[2], unsigned row) { ldmatrix(tiles, row, true); }

template <abi::Type type>
constexpr emulator::MatrixType matrix_type =
    type == abi::Type::float16 ? emulator::MatrixType::float16 : emulator::MatrixType::bfloat16;

inline void multiply(emulator::WarpOp op, emulator::MatrixType type, float* D, const unsigned* A, const unsigned* B) {
  emulator::MultiplyOperand operand{type, D, A, B};
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

}  // namespace flash_attention::ptx
