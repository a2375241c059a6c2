#pragma once

// Loads and stores of 2, 4, 8 or 16 bytes, each one instruction (PTX ISA 9.7.9.8 ld, 9.7.9.9 ld.global.nc, 9.7.9.11 st).
// The type's size chooses the width; its address must be a multiple of it.

#include "ptx/shared.cuh"

namespace flash_attention::ptx {

/// n values that move together: Vector<float, 4> is one 16-byte access.
template <typename T, int n>
struct alignas(n * sizeof(T)) Vector {
  T values[n];
  __device__ __forceinline__ T& operator[](int i) { return values[i]; }
  __device__ __forceinline__ const T& operator[](int i) const { return values[i]; }
};

/// prefetch.global.L2 (9.7.9.17): prefetches the cache line of an address to L2. No thread waits for it.
__device__ __forceinline__ void prefetch_L2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// One access, written once for every width. `bits` is the value as 32-bit words (or one 16-bit word).
#define FLASH_ATTENTION_LOAD(instruction, constraint, address, clobber...)                                              \
  static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, "2, 4, 8 or 16 bytes");          \
  static_assert(alignof(T) == sizeof(T), "an access must be aligned to its size");                                      \
  if constexpr (sizeof(T) == 2) {                                                                                       \
    unsigned short bits;                                                                                                \
    asm volatile(instruction ".b16 %0, [%1];" : "=h"(bits) : constraint(address) : clobber);                            \
    return __builtin_bit_cast(T, bits);                                                                                 \
  } else if constexpr (sizeof(T) == 4) {                                                                                \
    unsigned bits;                                                                                                      \
    asm volatile(instruction ".b32 %0, [%1];" : "=r"(bits) : constraint(address) : clobber);                            \
    return __builtin_bit_cast(T, bits);                                                                                 \
  } else if constexpr (sizeof(T) == 8) {                                                                                \
    Vector<unsigned, 2> bits;                                                                                           \
    asm volatile(instruction ".v2.b32 {%0, %1}, [%2];" : "=r"(bits[0]), "=r"(bits[1]) : constraint(address) : clobber); \
    return __builtin_bit_cast(T, bits);                                                                                 \
  } else {                                                                                                              \
    Vector<unsigned, 4> bits;                                                                                           \
    asm volatile(instruction ".v4.b32 {%0, %1, %2, %3}, [%4];"                                                          \
                 : "=r"(bits[0]), "=r"(bits[1]), "=r"(bits[2]), "=r"(bits[3])                                           \
                 : constraint(address)                                                                                  \
                 : clobber);                                                                                            \
    return __builtin_bit_cast(T, bits);                                                                                 \
  }

#define FLASH_ATTENTION_STORE(instruction, constraint, address)                                                       \
  static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, "2, 4, 8 or 16 bytes");        \
  static_assert(alignof(T) == sizeof(T), "an access must be aligned to its size");                                    \
  if constexpr (sizeof(T) == 2) {                                                                                     \
    const auto bits = __builtin_bit_cast(unsigned short, value);                                                      \
    asm volatile(instruction ".b16 [%0], %1;" ::constraint(address), "h"(bits) : "memory");                           \
  } else if constexpr (sizeof(T) == 4) {                                                                              \
    const auto bits = __builtin_bit_cast(unsigned, value);                                                            \
    asm volatile(instruction ".b32 [%0], %1;" ::constraint(address), "r"(bits) : "memory");                           \
  } else if constexpr (sizeof(T) == 8) {                                                                              \
    const auto bits = __builtin_bit_cast(Vector<unsigned, 2>, value);                                                 \
    asm volatile(instruction ".v2.b32 [%0], {%1, %2};" ::constraint(address), "r"(bits[0]), "r"(bits[1]) : "memory"); \
  } else {                                                                                                            \
    const auto bits = __builtin_bit_cast(Vector<unsigned, 4>, value);                                                 \
    asm volatile(instruction ".v4.b32 [%0], {%1, %2, %3, %4};" ::constraint(address), "r"(bits[0]), "r"(bits[1]),     \
                 "r"(bits[2]), "r"(bits[3])                                                                           \
                 : "memory");                                                                                         \
  }

/// ld.global: memory that this kernel may also write.
template <typename T>
__device__ __forceinline__ T load_global(const T* address) {
  FLASH_ATTENTION_LOAD("ld.global", "l", address, "memory")
}

/// ld.global.nc: memory that nothing writes while the kernel runs. The load may be moved, and kept in the read-only
/// cache.
template <typename T>
__device__ __forceinline__ T load_readonly(const T* address) {
  FLASH_ATTENTION_LOAD("ld.global.nc", "l", address)
}

/// st.global.
template <typename T>
__device__ __forceinline__ void store_global(T* address, const T& value) {
  FLASH_ATTENTION_STORE("st.global", "l", address)
}

/// ld.shared, by 32-bit shared address.
template <typename T>
__device__ __forceinline__ T load_shared(unsigned address) {
  FLASH_ATTENTION_LOAD("ld.shared", "r", address, "memory")
}

/// st.shared, by 32-bit shared address.
template <typename T>
__device__ __forceinline__ void store_shared(unsigned address, const T& value) {
  FLASH_ATTENTION_STORE("st.shared", "r", address)
}

#undef FLASH_ATTENTION_LOAD
#undef FLASH_ATTENTION_STORE

}  // namespace flash_attention::ptx
