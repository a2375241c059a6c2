#pragma once

// Emulated: kernels/ptx/wgmma.cuh.

#include "abi/config.h"
#include "ptx/shared.cuh"

namespace flash_attention::ptx {

enum class Major : int { k = 0, mn = 1 };

inline unsigned long long wgmma_descriptor(const void* tile, int leading, int stride, int swizzle_bytes = 128) {
  const unsigned long long swizzle = swizzle_bytes == 128 ? 1 : swizzle_bytes == 64 ? 2 : swizzle_bytes == 32 ? 3 : 0;
  return ((shared_address(tile) & 0x3ffff) >> 4) | static_cast<unsigned long long>(leading >> 4) << 16 |
         static_cast<unsigned long long>(stride >> 4) << 32 | swizzle << 62;
}

inline void wgmma_fence() { emulator::table->wgmma_fence(); }
inline void wgmma_commit() { emulator::table->wgmma_commit(); }

template <int pending>
inline void wgmma_wait() {
  emulator::table->wgmma_wait(pending);
}

template <int count>
inline void wgmma_pin(float (&)[count]) {}
template <int rows, int count>
inline void wgmma_pin(unsigned (&)[rows][count]) {}

constexpr bool wgmma_has_shape(int n) {
  return n == 32 || n == 64 || n == 80 || n == 96 || n == 128 || n == 160 || n == 176 || n == 192 || n == 224 || n == 256;
}

template <abi::Type type>
constexpr emulator::MatrixType wgmma_type =
    type == abi::Type::float16 ? emulator::MatrixType::float16 : emulator::MatrixType::bfloat16;

template <abi::Type type, int N, Major a_major, Major b_major>
inline void wgmma_ss(float (&D)[N / 2], unsigned long long A, unsigned long long B, bool accumulate) {
  static_assert(wgmma_has_shape(N) && type != abi::Type::float32);
  emulator::table->wgmma({.n = N,
                          .type = wgmma_type<type>,
                          .a_mn_major = a_major == Major::mn,
                          .b_mn_major = b_major == Major::mn,
                          .a_descriptor = A,
                          .b_descriptor = B,
                          .accumulate = accumulate,
                          .D = D});
}

template <abi::Type type, int N, Major b_major>
inline void wgmma_rs(float (&D)[N / 2], const unsigned (&A)[4], unsigned long long B, bool accumulate) {
  static_assert(wgmma_has_shape(N) && type != abi::Type::float32);
  emulator::table->wgmma({.n = N,
                          .type = wgmma_type<type>,
                          .b_mn_major = b_major == Major::mn,
                          .a_registers = A,
                          .b_descriptor = B,
                          .accumulate = accumulate,
                          .D = D});
}

}  // namespace flash_attention::ptx
