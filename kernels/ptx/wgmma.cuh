#pragma once

// Warpgroup matrix products, D[64 x N] (+)= A[64 x 16] B[16 x N], asynchronous (PTX ISA 9.7.15).
//
// D and A's register form are spread over the 128 threads of the warpgroup: thread t, warp w = t / 32, lane l = t % 32,
//   D[i]  is row 16 w + l / 4 + 8 ((i / 2) % 2), column 8 (i / 4) + 2 (l % 4) + i % 2;
//   A[r]  holds two 16-bit elements of row 16 w + l / 4 + 8 (r % 2), columns 2 (l % 4) + 8 (r / 2) and the next, low half
//   first.
// So a score tile in D becomes the A of the next product by packing neighbours, without moving between threads.
//
// Order: wgmma_fence, products, wgmma_commit, wgmma_wait. Until the wait no other instruction may touch the registers of a
// product in flight: wgmma_pin tells the compiler.

#include "abi/config.h"
#include "ptx/shared.cuh"

namespace flash_attention::ptx {

/// Which index of an operand in shared memory is contiguous: the contracted one (k), or the row or column (mn).
enum class Major : int { k = 0, mn = 1 };

/// A matrix descriptor (9.7.15.5.1.2.2) of tiles whose rows are swizzled over 128, 64 or 32 bytes: 8 rows are an atom, on
/// whose size the tile begins. `stride` is the bytes from one group of 8 rows to the next; `leading`, used when mn is
/// contiguous, from one row's width of columns to the next. Adding b / 16 to a descriptor moves its start by b bytes.
/// Without a swizzle (0) an atom is 8 rows of 16 bytes, one after another; `leading` is from eight k to the next eight.
__device__ __forceinline__ unsigned long long wgmma_descriptor(const void* tile, int leading, int stride,
                                                               int swizzle_bytes = 128) {
  const unsigned long long swizzle = swizzle_bytes == 128 ? 1 : swizzle_bytes == 64 ? 2 : swizzle_bytes == 32 ? 3 : 0;
  return ((shared_address(tile) & 0x3ffff) >> 4) | static_cast<unsigned long long>(leading >> 4) << 16 |
         static_cast<unsigned long long>(stride >> 4) << 32 | swizzle << 62;
}

/// wgmma.fence (9.7.15.7.1): registers written by ordinary instructions are ready for the products that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

/// wgmma.commit_group (9.7.15.7.2): closes the group of products issued so far.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

/// wgmma.wait_group (9.7.15.7.3): all but the latest `pending` groups are complete; groups complete in order.
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

/// No instruction: the compiler may not move uses of these registers across this point.
template <int count>
__device__ __forceinline__ void wgmma_pin(float (&registers)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
template <int rows, int count>
__device__ __forceinline__ void wgmma_pin(unsigned (&registers)[rows][count]) {
#pragma unroll
  for (int r = 0; r < rows; ++r) {
#pragma unroll
    for (int i = 0; i < count; ++i) asm volatile("" : "+r"(registers[r][i])::"memory");
  }
}

// An asm statement needs its operands spelled out, and C++20 cannot build the text: these macros do, for the shapes the
// kernels use. LIST10(2) is "%20, ..., %29"; OUT8(8) is D[8] to D[15].
#define FLASH_ATTENTION_LIST10(t) \
  "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9"
#define FLASH_ATTENTION_OUT8(i) \
  "+f"(D[i]), "+f"(D[i + 1]), "+f"(D[i + 2]), "+f"(D[i + 3]), "+f"(D[i + 4]), "+f"(D[i + 5]), "+f"(D[i + 6]), "+f"(D[i + 7])

#define FLASH_ATTENTION_LIST16 FLASH_ATTENTION_LIST10() ", %10, %11, %12, %13, %14, %15"
#define FLASH_ATTENTION_LIST30 FLASH_ATTENTION_LIST10() ", " FLASH_ATTENTION_LIST10(1) ", " FLASH_ATTENTION_LIST10(2)
#define FLASH_ATTENTION_LIST32 FLASH_ATTENTION_LIST30 ", %30, %31"
#define FLASH_ATTENTION_LIST40 FLASH_ATTENTION_LIST30 ", " FLASH_ATTENTION_LIST10(3)
#define FLASH_ATTENTION_LIST48 FLASH_ATTENTION_LIST40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define FLASH_ATTENTION_LIST60 FLASH_ATTENTION_LIST40 ", " FLASH_ATTENTION_LIST10(4) ", " FLASH_ATTENTION_LIST10(5)
#define FLASH_ATTENTION_LIST64 FLASH_ATTENTION_LIST60 ", %60, %61, %62, %63"
#define FLASH_ATTENTION_LIST80 FLASH_ATTENTION_LIST60 ", " FLASH_ATTENTION_LIST10(6) ", " FLASH_ATTENTION_LIST10(7)
#define FLASH_ATTENTION_LIST88 FLASH_ATTENTION_LIST80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define FLASH_ATTENTION_LIST96 FLASH_ATTENTION_LIST80 ", " FLASH_ATTENTION_LIST10(8) ", %90, %91, %92, %93, %94, %95"
#define FLASH_ATTENTION_LIST110 \
  FLASH_ATTENTION_LIST80 ", " FLASH_ATTENTION_LIST10(8) ", " FLASH_ATTENTION_LIST10(9) ", " FLASH_ATTENTION_LIST10(10)
#define FLASH_ATTENTION_LIST112 FLASH_ATTENTION_LIST110 ", %110, %111"
#define FLASH_ATTENTION_LIST128 \
  FLASH_ATTENTION_LIST110 ", " FLASH_ATTENTION_LIST10(11) ", %120, %121, %122, %123, %124, %125, %126, %127"

#define FLASH_ATTENTION_OUT16 FLASH_ATTENTION_OUT8(0), FLASH_ATTENTION_OUT8(8)
#define FLASH_ATTENTION_OUT32 FLASH_ATTENTION_OUT16, FLASH_ATTENTION_OUT8(16), FLASH_ATTENTION_OUT8(24)
#define FLASH_ATTENTION_OUT40 FLASH_ATTENTION_OUT32, FLASH_ATTENTION_OUT8(32)
#define FLASH_ATTENTION_OUT48 FLASH_ATTENTION_OUT40, FLASH_ATTENTION_OUT8(40)
#define FLASH_ATTENTION_OUT64 FLASH_ATTENTION_OUT48, FLASH_ATTENTION_OUT8(48), FLASH_ATTENTION_OUT8(56)
#define FLASH_ATTENTION_OUT80 FLASH_ATTENTION_OUT64, FLASH_ATTENTION_OUT8(64), FLASH_ATTENTION_OUT8(72)
#define FLASH_ATTENTION_OUT88 FLASH_ATTENTION_OUT80, FLASH_ATTENTION_OUT8(80)
#define FLASH_ATTENTION_OUT96 FLASH_ATTENTION_OUT88, FLASH_ATTENTION_OUT8(88)
#define FLASH_ATTENTION_OUT112 FLASH_ATTENTION_OUT96, FLASH_ATTENTION_OUT8(96), FLASH_ATTENTION_OUT8(104)
#define FLASH_ATTENTION_OUT128 FLASH_ATTENTION_OUT112, FLASH_ATTENTION_OUT8(112), FLASH_ATTENTION_OUT8(120)

// One product with A in shared memory. `regs` lists the registers of D; then the numbers of the operands that follow
// them.
#define FLASH_ATTENTION_WGMMA_SS(n, type, regs, a, b, p, ta, tb)                                                          \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #p ", 0; wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type \
               " {" FLASH_ATTENTION_LIST##regs "}, %" #a ", %" #b ", p, 1, 1, %" #ta ", %" #tb "; }"                      \
               : FLASH_ATTENTION_OUT##regs                                                                                \
               : "l"(A), "l"(B), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(a_major)),                       \
                 "n"(static_cast<int>(b_major)))

// The same with A in registers.
#define FLASH_ATTENTION_WGMMA_RS(n, type, regs, a0, a1, a2, a3, b, p, tb)                                                 \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #p ", 0; wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type \
               " {" FLASH_ATTENTION_LIST##regs "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b ", p, 1, 1, %" #tb     \
                                               "; }"                                                                      \
               : FLASH_ATTENTION_OUT##regs                                                                                \
               : "r"(A[0]), "r"(A[1]), "r"(A[2]), "r"(A[3]), "l"(B), "r"(static_cast<int>(accumulate)),                   \
                 "n"(static_cast<int>(b_major)))

#define FLASH_ATTENTION_SHAPES_SS(type)                                                      \
  if constexpr (N == 32) FLASH_ATTENTION_WGMMA_SS(32, type, 16, 16, 17, 18, 19, 20);         \
  if constexpr (N == 64) FLASH_ATTENTION_WGMMA_SS(64, type, 32, 32, 33, 34, 35, 36);         \
  if constexpr (N == 80) FLASH_ATTENTION_WGMMA_SS(80, type, 40, 40, 41, 42, 43, 44);         \
  if constexpr (N == 96) FLASH_ATTENTION_WGMMA_SS(96, type, 48, 48, 49, 50, 51, 52);         \
  if constexpr (N == 128) FLASH_ATTENTION_WGMMA_SS(128, type, 64, 64, 65, 66, 67, 68);       \
  if constexpr (N == 160) FLASH_ATTENTION_WGMMA_SS(160, type, 80, 80, 81, 82, 83, 84);       \
  if constexpr (N == 176) FLASH_ATTENTION_WGMMA_SS(176, type, 88, 88, 89, 90, 91, 92);       \
  if constexpr (N == 192) FLASH_ATTENTION_WGMMA_SS(192, type, 96, 96, 97, 98, 99, 100);      \
  if constexpr (N == 224) FLASH_ATTENTION_WGMMA_SS(224, type, 112, 112, 113, 114, 115, 116); \
  if constexpr (N == 256) FLASH_ATTENTION_WGMMA_SS(256, type, 128, 128, 129, 130, 131, 132)

#define FLASH_ATTENTION_SHAPES_RS(type)                                                                \
  if constexpr (N == 32) FLASH_ATTENTION_WGMMA_RS(32, type, 16, 16, 17, 18, 19, 20, 21, 22);           \
  if constexpr (N == 64) FLASH_ATTENTION_WGMMA_RS(64, type, 32, 32, 33, 34, 35, 36, 37, 38);           \
  if constexpr (N == 80) FLASH_ATTENTION_WGMMA_RS(80, type, 40, 40, 41, 42, 43, 44, 45, 46);           \
  if constexpr (N == 96) FLASH_ATTENTION_WGMMA_RS(96, type, 48, 48, 49, 50, 51, 52, 53, 54);           \
  if constexpr (N == 128) FLASH_ATTENTION_WGMMA_RS(128, type, 64, 64, 65, 66, 67, 68, 69, 70);         \
  if constexpr (N == 160) FLASH_ATTENTION_WGMMA_RS(160, type, 80, 80, 81, 82, 83, 84, 85, 86);         \
  if constexpr (N == 176) FLASH_ATTENTION_WGMMA_RS(176, type, 88, 88, 89, 90, 91, 92, 93, 94);         \
  if constexpr (N == 192) FLASH_ATTENTION_WGMMA_RS(192, type, 96, 96, 97, 98, 99, 100, 101, 102);      \
  if constexpr (N == 224) FLASH_ATTENTION_WGMMA_RS(224, type, 112, 112, 113, 114, 115, 116, 117, 118); \
  if constexpr (N == 256) FLASH_ATTENTION_WGMMA_RS(256, type, 128, 128, 129, 130, 131, 132, 133, 134)

/// Whether a product of this width is among the shapes above.
__device__ constexpr bool wgmma_has_shape(int n) {
  return n == 32 || n == 64 || n == 80 || n == 96 || n == 128 || n == 160 || n == 176 || n == 192 || n == 224 || n == 256;
}

/// wgmma.mma_async (9.7.15.5.2), A and B by descriptors. D is overwritten if `accumulate` is false.
template <abi::Type type, int N, Major a_major, Major b_major>
__device__ __forceinline__ void wgmma_ss(float (&D)[N / 2], unsigned long long A, unsigned long long B, bool accumulate) {
  static_assert(wgmma_has_shape(N) && type != abi::Type::float32);
  if constexpr (type == abi::Type::bfloat16) {
    FLASH_ATTENTION_SHAPES_SS("bf16");
  } else {
    FLASH_ATTENTION_SHAPES_SS("f16");
  }
}

/// wgmma.mma_async (9.7.15.5.2), A from registers.
template <abi::Type type, int N, Major b_major>
__device__ __forceinline__ void wgmma_rs(float (&D)[N / 2], const unsigned (&A)[4], unsigned long long B, bool accumulate) {
  static_assert(wgmma_has_shape(N) && type != abi::Type::float32);
  if constexpr (type == abi::Type::bfloat16) {
    FLASH_ATTENTION_SHAPES_RS("bf16");
  } else {
    FLASH_ATTENTION_SHAPES_RS("f16");
  }
}

}  // namespace flash_attention::ptx
