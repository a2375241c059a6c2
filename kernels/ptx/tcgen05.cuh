#pragma once

// Tensor memory and the products of the fifth generation of tensor cores (PTX ISA 9.7.16), for sm_100 and sm_103.
//
// Tensor memory belongs to a thread block: 128 lanes of up to 512 columns of 32 bits. An address is lane * 65536 + column.
// One whole warp allocates columns and gives them back before the block ends; until then other blocks of the SM wait for
// them. Warp w of a warpgroup reaches the lanes from 32 w to 32 w + 31 and no others. In the loads and stores below thread
// t of such a warp has lane 32 w + t, so a thread owns a row.
//
// A product D[128 x N] (+)= A[128 x 16] B[16 x N] is issued by one thread: D is in tensor memory, row i in lane i; A is
// there, too, two values of 16 bits in a column, or in shared memory; B is in shared memory.
//
// Order. Loads, stores and products are asynchronous. Products of one thread with the same D and shape are executed in
// order; no others are.
//   load, store   tmem_wait_load, tmem_wait_store; then tcgen05_fence_before and a barrier tell other threads
//   products      tcgen05_commit lets an mbarrier tell when they are done; no fence before it is needed
//   who was told  tcgen05_fence_after, then its own loads, stores and products

#include "abi/config.h"
#include "ptx/mbarrier.cuh"

namespace flash_attention::ptx {

/// tcgen05.alloc (9.7.16.7.1): one whole warp. The address of the first of `columns` columns comes to `address`, in shared
/// memory. Waits while other blocks of the SM have too many. `columns` is a power of two from 32 to 512.
template <int columns>
__device__ __forceinline__ void tmem_alloc(unsigned& address) {
  asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(shared_address(&address)),
               "n"(columns)
               : "memory");
}

/// tcgen05.relinquish_alloc_permit: this block allocates no more.
__device__ __forceinline__ void tmem_relinquish() {
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");
}

/// tcgen05.dealloc: the warp that allocated them gives columns back.
template <int columns>
__device__ __forceinline__ void tmem_dealloc(unsigned address) {
  asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(address), "n"(columns) : "memory");
}

// An asm statement needs its operands spelled out.
#define FLASH_ATTENTION_TMEM_8(of, i) of(i), of(i + 1), of(i + 2), of(i + 3), of(i + 4), of(i + 5), of(i + 6), of(i + 7)
#define FLASH_ATTENTION_TMEM_16(of) FLASH_ATTENTION_TMEM_8(of, 0), FLASH_ATTENTION_TMEM_8(of, 8)
#define FLASH_ATTENTION_TMEM_32(of) \
  FLASH_ATTENTION_TMEM_16(of), FLASH_ATTENTION_TMEM_8(of, 16), FLASH_ATTENTION_TMEM_8(of, 24)
#define FLASH_ATTENTION_TMEM_OUT(i) "=f"(row[i])
#define FLASH_ATTENTION_TMEM_IN(i) "r"(__builtin_bit_cast(unsigned, row[i]))

/// tcgen05.ld.32x32b (9.7.16.8): the whole warp; `count` columns of the thread's lane, from the address on, whose lane is
/// the first of the warp. The registers hold them after tmem_wait_load.
template <int count>
__device__ __forceinline__ void tmem_load(float (&row)[count], unsigned address) {
  static_assert(count == 16 || count == 32);
  if constexpr (count == 32) {
    asm volatile(
        "tcgen05.ld.sync.aligned.32x32b.x32.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, "
        "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, [%32];"
        : FLASH_ATTENTION_TMEM_32(FLASH_ATTENTION_TMEM_OUT)
        : "r"(address)
        : "memory");
  } else {
    asm volatile(
        "tcgen05.ld.sync.aligned.32x32b.x16.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "[%16];"
        : FLASH_ATTENTION_TMEM_16(FLASH_ATTENTION_TMEM_OUT)
        : "r"(address)
        : "memory");
  }
}

/// tcgen05.st.32x32b (9.7.16.8): the same the other way; done after tmem_wait_store.
template <typename T, int count>
__device__ __forceinline__ void tmem_store(unsigned address, const T (&row)[count]) {
  static_assert(sizeof(T) == 4 && (count == 16 || count == 32));
  if constexpr (count == 32) {
    asm volatile(
        "tcgen05.st.sync.aligned.32x32b.x32.b32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32};" ::"r"(address),
        FLASH_ATTENTION_TMEM_32(FLASH_ATTENTION_TMEM_IN)
        : "memory");
  } else {
    asm volatile(
        "tcgen05.st.sync.aligned.32x32b.x16.b32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16};" ::"r"(address),
        FLASH_ATTENTION_TMEM_16(FLASH_ATTENTION_TMEM_IN)
        : "memory");
  }
}

#undef FLASH_ATTENTION_TMEM_8
#undef FLASH_ATTENTION_TMEM_16
#undef FLASH_ATTENTION_TMEM_32
#undef FLASH_ATTENTION_TMEM_OUT
#undef FLASH_ATTENTION_TMEM_IN

/// tcgen05.wait::ld, tcgen05.wait::st (9.7.16.8.5): the warp's earlier loads or stores are done.
__device__ __forceinline__ void tmem_wait_load() { asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void tmem_wait_store() { asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory"); }

/// No instruction: the compiler may not use these registers, into which tmem_load loads, before this point.
template <int count>
__device__ __forceinline__ void tmem_pin(float (&row)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(row[i])::"memory");
}

/// tcgen05.fence::before_thread_sync, ::after_thread_sync (9.7.16.11): around the barrier by which one thread tells another
/// of its loads, stores or products.
__device__ __forceinline__ void tcgen05_fence_before() { asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }
__device__ __forceinline__ void tcgen05_fence_after() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }

/// Which index of an operand in shared memory is contiguous: the contracted one (k), or the row or column (mn).
enum class Tcgen05Major : int { k = 0, mn = 1 };

/// A matrix descriptor (9.7.16.4.1) of a tile whose rows of 128 bytes are swizzled; it begins at a multiple of 1024 bytes.
/// `stride` is the bytes from one group of 8 rows to the next; `leading`, used if mn is contiguous, from one row's width of
/// columns to the next. Adding b / 16 to a descriptor moves its start by b bytes. Not a descriptor of wgmma: it has a
/// version, and other numbers for swizzles.
__device__ __forceinline__ unsigned long long tcgen05_descriptor(const void* tile, int leading, int stride) {
  constexpr unsigned long long version = 1, swizzle_128_bytes = 2;
  return ((shared_address(tile) & 0x3ffff) >> 4) | static_cast<unsigned long long>(leading >> 4) << 16 |
         static_cast<unsigned long long>(stride >> 4) << 32 | version << 46 | swizzle_128_bytes << 61;
}

/// An instruction descriptor (9.7.16.4.2): M = 128, so many columns N, a multiple of 16 up to 256, fp32 sums.
template <abi::Type type, int N, Tcgen05Major a_major, Tcgen05Major b_major>
__device__ constexpr unsigned tcgen05_shape() {
  static_assert(N % 16 == 0 && N >= 16 && N <= 256 && (type == abi::Type::float16 || type == abi::Type::bfloat16));
  constexpr unsigned element = type == abi::Type::bfloat16 ? 1 : 0, sums_fp32 = 1, M = 128;
  return sums_fp32 << 4 | element << 7 | element << 10 | static_cast<unsigned>(a_major) << 15 |
         static_cast<unsigned>(b_major) << 16 | N / 8u << 17 | M / 16 << 24;
}

/// tcgen05.mma.kind::f16 (9.7.16.10.9), by one thread: A and B by descriptors; D is overwritten if `accumulate` is false.
__device__ __forceinline__ void tcgen05_mma_ss(unsigned D, unsigned long long A, unsigned long long B, unsigned shape,
                                               bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %4, 0;\n"
      "tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p;\n"
      "}\n" ::"r"(D),
      "l"(A), "l"(B), "r"(shape), "r"(static_cast<int>(accumulate))
      : "memory");
}

/// The same with A in tensor memory, at an address.
__device__ __forceinline__ void tcgen05_mma_ts(unsigned D, unsigned A, unsigned long long B, unsigned shape,
                                               bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %4, 0;\n"
      "tcgen05.mma.cta_group::1.kind::f16 [%0], [%1], %2, %3, p;\n"
      "}\n" ::"r"(D),
      "r"(A), "l"(B), "r"(shape), "r"(static_cast<int>(accumulate))
      : "memory");
}

/// tcgen05.commit (9.7.16.11): one arrival at `barrier` when all products that this thread has issued are done.
__device__ __forceinline__ void tcgen05_commit(Mbarrier& barrier) {
  asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(shared_address(&barrier))
               : "memory");
}

}  // namespace flash_attention::ptx
