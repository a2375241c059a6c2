#pragma once

// stmatrix: 8x8 tiles of 16-bit elements from a warp's registers to shared memory (PTX ISA 9.7.14.5.16).

#include "ptx/shared.cuh"

namespace flash_attention::ptx {

/// stmatrix.x4: lane l gives the address of row l % 8 of tile l / 8; registers hold the tiles in accumulator order.
__device__ __forceinline__ void stmatrix_x4(void* row, unsigned r0, unsigned r1, unsigned r2, unsigned r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)), "r"(r0),
               "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

/// stmatrix.x4.trans: each tile is transposed on the way.
__device__ __forceinline__ void stmatrix_x4_trans(void* row, unsigned r0, unsigned r1, unsigned r2, unsigned r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)), "r"(r0),
               "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

}  // namespace flash_attention::ptx
