#pragma once

// The tile registers of AMX: eight of 16 rows of 64 bytes. Intel's manual, volume 2: TILELOADD, TILESTORED, TDPBF16PS. The
// compiler's own wrappers take the number of a register as text, so these are written out.

#include "cpu/simd/avx512_bf16.h"

namespace flash_attention::cpu {
namespace {

struct AmxTiles {
  /// Palette 1, all eight tiles at their full size.
  static void configure() {
    struct alignas(64) {
      std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
      std::uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    static_assert(sizeof config == 64);
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
  }
  static void release() { __asm__ volatile("tilerelease" : : : "memory"); }

  template <int tile>
  static FLASH_ATTENTION_INLINE void zero() {
    __asm__ volatile("tilezero %%tmm%c0" : : "i"(tile));
  }
  template <int tile>
  static FLASH_ATTENTION_INLINE void load(const void* from, std::int64_t stride_bytes) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride_bytes), "i"(tile) : "memory");
  }
  template <int tile>
  static FLASH_ATTENTION_INLINE void store(void* to, std::int64_t stride_bytes) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride_bytes), "i"(tile) : "memory");
  }
  /// sum[m][n] += a[m][2k] * b[k][2n] + a[m][2k + 1] * b[k][2n + 1], over bfloat16.
  template <int sum, int a, int b>
  static FLASH_ATTENTION_INLINE void multiply() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sum), "i"(a), "i"(b));
  }

  static FLASH_ATTENTION_INLINE Short round(Vec x) { return round_to_bfloat16(x); }
  static FLASH_ATTENTION_INLINE Vec pair(Vec low, Vec high) { return round_to_pair(low, high); }
};

}  // namespace
}  // namespace flash_attention::cpu
