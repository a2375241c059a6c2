#pragma once

// Emulated: kernels/ptx/wmma.cuh.

#include "ptx/matrix.cuh"

namespace flash_attention::ptx {

template <abi::Type type>
struct WmmaOperand {
  static_assert(type != abi::Type::float32, "16-bit inputs");
  unsigned registers[type == abi::Type::float16 ? 8 : 4];
};
struct WmmaAccumulator {
  float registers[8];
};

inline void wmma_move(emulator::WarpOp op, unsigned tile, int stride, bool column_major, const void* registers) {
  emulator::WmmaMoveOperand operand{tile, stride, column_major, const_cast<void*>(registers)};
  emulator::table->warp(op, &operand);
}

template <abi::Type type>
inline void wmma_load_a(WmmaOperand<type>& A, unsigned tile, int stride) {
  wmma_move(emulator::WarpOp::wmma_load, tile, stride, false, A.registers);
}
template <abi::Type type>
inline void wmma_load_b(WmmaOperand<type>& B, unsigned tile, int stride) {
  wmma_move(emulator::WarpOp::wmma_load, tile, stride, false, B.registers);
}
template <abi::Type type>
inline void wmma_load_b_transposed(WmmaOperand<type>& B, unsigned tile, int stride) {
  wmma_move(emulator::WarpOp::wmma_load, tile, stride, true, B.registers);
}

template <abi::Type type, bool b_transposed>
inline void wmma_multiply(WmmaAccumulator& D, const WmmaOperand<type>& A, const WmmaOperand<type>& B) {
  multiply(emulator::WarpOp::wmma_multiply, matrix_type<type>, D.registers, A.registers, B.registers);
}

inline void wmma_store(unsigned tile, const WmmaAccumulator& D, int stride) {
  wmma_move(emulator::WarpOp::wmma_store, tile, stride, false, D.registers);
}

}  // namespace flash_attention::ptx
