#pragma once

// Emulated: kernels/ptx/matrix_store.cuh.

#include "ptx/shared.cuh"

namespace flash_attention::ptx {

inline void stmatrix(void* row, bool transposed, unsigned r0, unsigned r1, unsigned r2, unsigned r3) {
  unsigned tiles[4] = {r0, r1, r2, r3};
  emulator::MatrixMoveOperand operand{4, transposed, shared_address(row), tiles};
  emulator::table->warp(emulator::WarpOp::stmatrix, &operand);
}

inline void stmatrix_x4(void* row, unsigned r0, unsigned r1, unsigned r2, unsigned r3) {
  stmatrix(row, false, r0, r1, r2, r3);
}

inline void stmatrix_x4_trans(void* row, unsigned r0, unsigned r1, unsigned r2, unsigned r3) {
  stmatrix(row, true, r0, r1, r2, r3);
}

}  // namespace flash_attention::ptx
