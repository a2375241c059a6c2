#pragma once

namespace flash_attention::emulator {

// The warp's matrix instructions, on the operands of its 32 lanes (interface.h).
void ldmatrix(void* const* operands);       // MatrixMoveOperand
void stmatrix(void* const* operands);       // MatrixMoveOperand
void mma(void* const* operands);            // MultiplyOperand
void wmma_load(void* const* operands);      // WmmaMoveOperand
void wmma_multiply(void* const* operands);  // MultiplyOperand
void wmma_store(void* const* operands);     // WmmaMoveOperand

}  // namespace flash_attention::emulator
