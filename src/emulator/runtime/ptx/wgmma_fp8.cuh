#pragma once

// Emulated: kernels/ptx/wgmma_fp8.cuh.

#include "ptx/wgmma.cuh"

namespace flash_attention::ptx {

constexpr bool wgmma_fp8_has_shape(int n) { return n >= 32 && n <= 256 && n % 32 == 0; }

template <abi::Type type>
constexpr emulator::MatrixType wgmma_fp8_type =
    type == abi::Type::e4m3 ? emulator::MatrixType::e4m3 : emulator::MatrixType::e5m2;

template <abi::Type a_type, abi::Type b_type, int N>
inline void wgmma_fp8_ss(float (&D)[N / 2], unsigned long long A, unsigned long long B, bool accumulate) {
  static_assert(wgmma_fp8_has_shape(N) && a_type == b_type);
  emulator::table->wgmma(
      {.n = N, .type = wgmma_fp8_type<b_type>, .a_descriptor = A, .b_descriptor = B, .accumulate = accumulate, .D = D});
}

template <abi::Type b_type, int N>
inline void wgmma_fp8_rs(float (&D)[N / 2], const unsigned (&A)[4], unsigned long long B, bool accumulate) {
  static_assert(wgmma_fp8_has_shape(N));
  emulator::table->wgmma(
      {.n = N, .type = wgmma_fp8_type<b_type>, .a_registers = A, .b_descriptor = B, .accumulate = accumulate, .D = D});
}

}  // namespace flash_attention::ptx
