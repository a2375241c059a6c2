#pragma once

// A warp's matrix instructions: ldmatrix (PTX ISA 9.7.14.5.15), movmatrix (9.7.14.5.17) and mma.sync (9.7.14.5.14, sm_80).
//
// Lane l, g = l / 4, t = l % 4. Products D[16 x 8] = A[16 x k] B[k x 8] + C; a register holds two 16-bit elements, the
// first in its low half:
//   A[0]: row g,     columns 2t, 2t + 1      A[1]: row g + 8, columns 2t, 2t + 1
//   A[2]: row g,     columns 2t + 8, 2t + 9  A[3]: row g + 8, columns 2t + 8, 2t + 9
//   B[0]: rows 2t, 2t + 1, column g          B[1]: rows 2t + 8, 2t + 9, column g
//   C[0], C[1]: row g, columns 2t, 2t + 1    C[2], C[3]: row g + 8, columns 2t, 2t + 1
// 8 bits, k = 32: a register holds four neighbours along k instead of two, so that columns (rows of B) 2t, 2t + 1 and
// 2t + 8, 2t + 9 become 4t ... 4t + 3 and 4t + 16 ... 4t + 19.
// tf32, k = 8: A[0]: (g, t), A[1]: (g + 8, t), A[2]: (g, t + 4), A[3]: (g + 8, t + 4); B[0]: (t, g), B[1]: (t + 4, g).

#include "abi/config.h"

namespace flash_attention::ptx {

/// ldmatrix.x4: four 8x8 tiles of 16-bit elements. Lane l gives the shared address of row l % 8 of tile l / 8; register i
/// receives row g, columns 2t and 2t + 1 of tile i.
__device__ __forceinline__ void ldmatrix_x4(unsigned (&tiles)[4], unsigned row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
               : "r"(row)
               : "memory");
}

/// ldmatrix.x4.trans: register i receives rows 2t and 2t + 1, column g of tile i.
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&tiles)[4], unsigned row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
               : "r"(row)
               : "memory");
}

/// movmatrix.trans: transposes an 8x8 tile of 16-bit elements. A lane gives row g, columns 2t and 2t + 1, and receives
/// rows 2t and 2t + 1, column g.
__device__ __forceinline__ unsigned transpose_8x8(unsigned pair) {
  unsigned result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

/// mma.m16n8k16, 16-bit inputs: D = A B + D in fp32.
template <abi::Type type>
__device__ __forceinline__ void mma_m16n8k16(float (&D)[4], const unsigned (&A)[4], const unsigned (&B)[2]) {
  static_assert(type != abi::Type::float32, "16-bit inputs; mma_m16n8k8_tf32 takes fp32");
  if constexpr (type == abi::Type::bfloat16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(D[0]), "+f"(D[1]), "+f"(D[2]), "+f"(D[3])
        : "r"(A[0]), "r"(A[1]), "r"(A[2]), "r"(A[3]), "r"(B[0]), "r"(B[1]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(D[0]), "+f"(D[1]), "+f"(D[2]), "+f"(D[3])
        : "r"(A[0]), "r"(A[1]), "r"(A[2]), "r"(A[3]), "r"(B[0]), "r"(B[1]));
  }
}

/// mma.m16n8k32 of e4m3 or e5m2 (sm_89): D = A B + D. Of a sum, the tensor core keeps about 14 bits: products and D are
/// aligned to the largest of them, and what is below is cut off.
template <abi::Type a_type, abi::Type b_type>
__device__ __forceinline__ void mma_m16n8k32(float (&D)[4], const unsigned (&A)[4], const unsigned (&B)[2]) {
#define FLASH_ATTENTION_MMA8(ta, tb)                                                                                    \
  asm volatile("mma.sync.aligned.m16n8k32.row.col.f32." ta "." tb                                                       \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                   \
               : "+f"(D[0]), "+f"(D[1]), "+f"(D[2]), "+f"(D[3])                                                         \
               : "r"(A[0]), "r"(A[1]), "r"(A[2]), "r"(A[3]), "r"(B[0]), "r"(B[1]))
  using abi::Type;
  static_assert((a_type == Type::e4m3 || a_type == Type::e5m2) && (b_type == Type::e4m3 || b_type == Type::e5m2));
  if constexpr (a_type == Type::e4m3 && b_type == Type::e4m3) FLASH_ATTENTION_MMA8("e4m3", "e4m3");
  if constexpr (a_type == Type::e4m3 && b_type == Type::e5m2) FLASH_ATTENTION_MMA8("e4m3", "e5m2");
  if constexpr (a_type == Type::e5m2 && b_type == Type::e4m3) FLASH_ATTENTION_MMA8("e5m2", "e4m3");
  if constexpr (a_type == Type::e5m2 && b_type == Type::e5m2) FLASH_ATTENTION_MMA8("e5m2", "e5m2");
#undef FLASH_ATTENTION_MMA8
}

/// mma.m16n8k8 with tf32 inputs (to_tf32): D = A B + D in fp32.
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&D)[4], const unsigned (&A)[4], const unsigned (&B)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(D[0]), "+f"(D[1]), "+f"(D[2]), "+f"(D[3])
      : "r"(A[0]), "r"(A[1]), "r"(A[2]), "r"(A[3]), "r"(B[0]), "r"(B[1]));
}

}  // namespace flash_attention::ptx
