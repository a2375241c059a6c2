#pragma once

// Warpgroup matrix products of 8-bit floats, D[64 x N] (+)= A[64 x 32] B[32 x N], asynchronous (PTX ISA 9.7.15). Both
// operands have the contracted index contiguous: there is no transposed form. D is spread as ptx/wgmma.cuh says;
//   A[r] holds four elements of row 16 w + l / 4 + 8 (r % 2), columns 4 (l % 4) + 16 (r / 2) and the next three.
// The tensor core keeps about 14 bits of a sum: it aligns products to the largest number of an instruction and of D,
// and truncates what is below. So long sums must be moved out of it now and then.

#include "ptx/wgmma.cuh"

namespace flash_attention::ptx {

#define FLASH_ATTENTION_WGMMA8_SS(n, ta, tb, regs, a, b, p)                                                           \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #p ", 0; wgmma.mma_async.sync.aligned.m64n" #n "k32.f32." ta "." tb \
               " {" FLASH_ATTENTION_LIST##regs "}, %" #a ", %" #b ", p, 1, 1; }"                                      \
               : FLASH_ATTENTION_OUT##regs                                                                            \
               : "l"(A), "l"(B), "r"(static_cast<int>(accumulate)))

#define FLASH_ATTENTION_WGMMA8_RS(n, ta, tb, regs, a0, a1, a2, a3, b, p)                                              \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #p ", 0; wgmma.mma_async.sync.aligned.m64n" #n "k32.f32." ta "." tb \
               " {" FLASH_ATTENTION_LIST##regs "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b ", p, 1, 1; }"     \
               : FLASH_ATTENTION_OUT##regs                                                                            \
               : "r"(A[0]), "r"(A[1]), "r"(A[2]), "r"(A[3]), "l"(B), "r"(static_cast<int>(accumulate)))

#define FLASH_ATTENTION_SHAPES8_SS(ta, tb)                                            \
  if constexpr (N == 32) FLASH_ATTENTION_WGMMA8_SS(32, ta, tb, 16, 16, 17, 18);       \
  if constexpr (N == 64) FLASH_ATTENTION_WGMMA8_SS(64, ta, tb, 32, 32, 33, 34);       \
  if constexpr (N == 96) FLASH_ATTENTION_WGMMA8_SS(96, ta, tb, 48, 48, 49, 50);       \
  if constexpr (N == 128) FLASH_ATTENTION_WGMMA8_SS(128, ta, tb, 64, 64, 65, 66);     \
  if constexpr (N == 160) FLASH_ATTENTION_WGMMA8_SS(160, ta, tb, 80, 80, 81, 82);     \
  if constexpr (N == 192) FLASH_ATTENTION_WGMMA8_SS(192, ta, tb, 96, 96, 97, 98);     \
  if constexpr (N == 224) FLASH_ATTENTION_WGMMA8_SS(224, ta, tb, 112, 112, 113, 114); \
  if constexpr (N == 256) FLASH_ATTENTION_WGMMA8_SS(256, ta, tb, 128, 128, 129, 130)

#define FLASH_ATTENTION_SHAPES8_RS(ta, tb)                                                           \
  if constexpr (N == 32) FLASH_ATTENTION_WGMMA8_RS(32, ta, tb, 16, 16, 17, 18, 19, 20, 21);          \
  if constexpr (N == 64) FLASH_ATTENTION_WGMMA8_RS(64, ta, tb, 32, 32, 33, 34, 35, 36, 37);          \
  if constexpr (N == 96) FLASH_ATTENTION_WGMMA8_RS(96, ta, tb, 48, 48, 49, 50, 51, 52, 53);          \
  if constexpr (N == 128) FLASH_ATTENTION_WGMMA8_RS(128, ta, tb, 64, 64, 65, 66, 67, 68, 69);        \
  if constexpr (N == 160) FLASH_ATTENTION_WGMMA8_RS(160, ta, tb, 80, 80, 81, 82, 83, 84, 85);        \
  if constexpr (N == 192) FLASH_ATTENTION_WGMMA8_RS(192, ta, tb, 96, 96, 97, 98, 99, 100, 101);      \
  if constexpr (N == 224) FLASH_ATTENTION_WGMMA8_RS(224, ta, tb, 112, 112, 113, 114, 115, 116, 117); \
  if constexpr (N == 256) FLASH_ATTENTION_WGMMA8_RS(256, ta, tb, 128, 128, 129, 130, 131, 132, 133)

/// Whether a product of this width is among the shapes above.
__device__ constexpr bool wgmma_fp8_has_shape(int n) { return n >= 32 && n <= 256 && n % 32 == 0; }

/// wgmma.mma_async (9.7.15.5.2) of e4m3 or e5m2, A and B by descriptors. D is overwritten if `accumulate` is false.
template <abi::Type a_type, abi::Type b_type, int N>
__device__ __forceinline__ void wgmma_fp8_ss(float (&D)[N / 2], unsigned long long A, unsigned long long B,
                                             bool accumulate) {
  static_assert(wgmma_fp8_has_shape(N) && a_type == b_type);
  if constexpr (a_type == abi::Type::e4m3) {
    FLASH_ATTENTION_SHAPES8_SS("e4m3", "e4m3");
  } else {
    static_assert(a_type == abi::Type::e5m2);
    FLASH_ATTENTION_SHAPES8_SS("e5m2", "e5m2");
  }
}

/// The same with A from registers, in e4m3.
template <abi::Type b_type, int N>
__device__ __forceinline__ void wgmma_fp8_rs(float (&D)[N / 2], const unsigned (&A)[4], unsigned long long B,
                                             bool accumulate) {
  static_assert(wgmma_fp8_has_shape(N));
  if constexpr (b_type == abi::Type::e4m3) {
    FLASH_ATTENTION_SHAPES8_RS("e4m3", "e4m3");
  } else {
    static_assert(b_type == abi::Type::e5m2);
    FLASH_ATTENTION_SHAPES8_RS("e4m3", "e5m2");
  }
}

}  // namespace flash_attention::ptx
