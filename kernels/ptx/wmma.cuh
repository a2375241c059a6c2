#pragma once

// Warp matrix instructions with opaque fragments (PTX ISA 9.7.14.4, wmma), 16 x 16 x 16, 16-bit inputs, fp32
// accumulator: the first step into tensor cores. The hardware does not tell how a fragment is spread over the lanes: a
// program can only load, multiply and store it.

#include "abi/config.h"

namespace flash_attention::ptx {

/// A 16 x 16 operand: 8 registers of fp16 pairs or 4 of bf16 pairs.
template <abi::Type type>
struct WmmaOperand {
  static_assert(type != abi::Type::float32, "16-bit inputs");
  unsigned registers[type == abi::Type::float16 ? 8 : 4];
};
struct WmmaAccumulator {
  float registers[8];
};

#define FLASH_ATTENTION_WMMA_LOAD(operand, layout)                                                                 \
  if constexpr (type == abi::Type::bfloat16) {                                                                     \
    asm volatile("wmma.load." operand ".sync.aligned.m16n16k16." layout ".shared.bf16 {%0, %1, %2, %3}, [%4], %5;" \
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])                                                  \
                 : "r"(tile), "r"(stride)                                                                          \
                 : "memory");                                                                                      \
  } else {                                                                                                         \
    asm volatile("wmma.load." operand ".sync.aligned.m16n16k16." layout                                            \
                 ".shared.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8], %9;"                                         \
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]), "=r"(r[7])  \
                 : "r"(tile), "r"(stride)                                                                          \
                 : "memory");                                                                                      \
  }

/// wmma.load.a.row: A from shared memory, row i at tile + i * stride elements. 32-byte aligned, stride a multiple of 8.
template <abi::Type type>
__device__ __forceinline__ void wmma_load_a(WmmaOperand<type>& A, unsigned tile, int stride) {
  auto& r = A.registers;
  FLASH_ATTENTION_WMMA_LOAD("a", "row")
}

/// wmma.load.b.row: B[k][n] with n contiguous, row k at tile + k * stride elements.
template <abi::Type type>
__device__ __forceinline__ void wmma_load_b(WmmaOperand<type>& B, unsigned tile, int stride) {
  auto& r = B.registers;
  FLASH_ATTENTION_WMMA_LOAD("b", "row")
}

/// wmma.load.b.col: B[k][n] with k contiguous, column n at tile + n * stride elements: a row-major tile, transposed.
template <abi::Type type>
__device__ __forceinline__ void wmma_load_b_transposed(WmmaOperand<type>& B, unsigned tile, int stride) {
  auto& r = B.registers;
  FLASH_ATTENTION_WMMA_LOAD("b", "col")
}

#undef FLASH_ATTENTION_WMMA_LOAD

#define FLASH_ATTENTION_WMMA_D \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])

/// wmma.mma: D = A B + D. `b_transposed` says how B was loaded.
template <abi::Type type, bool b_transposed>
__device__ __forceinline__ void wmma_multiply(WmmaAccumulator& D, const WmmaOperand<type>& A, const WmmaOperand<type>& B) {
  auto& d = D.registers;
  auto& a = A.registers;
  auto& b = B.registers;
#define FLASH_ATTENTION_WMMA_BF16(layout)                                                            \
  asm volatile("wmma.mma.sync.aligned.row." layout                                                   \
               ".m16n16k16.f32.bf16.bf16.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, " \
               "{%12, %13, %14, %15}, {%0, %1, %2, %3, %4, %5, %6, %7};"                             \
               : FLASH_ATTENTION_WMMA_D                                                              \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]))
#define FLASH_ATTENTION_WMMA_F16(layout)                                                                            \
  asm volatile("wmma.mma.sync.aligned.row." layout                                                                  \
               ".m16n16k16.f32.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11, %12, %13, %14, %15}, "      \
               "{%16, %17, %18, %19, %20, %21, %22, %23}, {%0, %1, %2, %3, %4, %5, %6, %7};"                        \
               : FLASH_ATTENTION_WMMA_D                                                                             \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]), "r"(b[0]), \
                 "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(b[4]), "r"(b[5]), "r"(b[6]), "r"(b[7]))
  if constexpr (type == abi::Type::bfloat16) {
    if constexpr (b_transposed) {
      FLASH_ATTENTION_WMMA_BF16("col");
    } else {
      FLASH_ATTENTION_WMMA_BF16("row");
    }
  } else {
    if constexpr (b_transposed) {
      FLASH_ATTENTION_WMMA_F16("col");
    } else {
      FLASH_ATTENTION_WMMA_F16("row");
    }
  }
#undef FLASH_ATTENTION_WMMA_BF16
#undef FLASH_ATTENTION_WMMA_F16
}

#undef FLASH_ATTENTION_WMMA_D

/// wmma.store.d.row: the accumulator to shared memory, row i at tile + i * stride floats.
__device__ __forceinline__ void wmma_store(unsigned tile, const WmmaAccumulator& D, int stride) {
  auto& d = D.registers;
  asm volatile("wmma.store.d.sync.aligned.m16n16k16.row.shared.f32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8}, %9;" ::"r"(tile),
               "f"(d[0]), "f"(d[1]), "f"(d[2]), "f"(d[3]), "f"(d[4]), "f"(d[5]), "f"(d[6]), "f"(d[7]), "r"(stride)
               : "memory");
}

}  // namespace flash_attention::ptx
