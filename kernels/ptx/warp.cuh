#pragma once

// Exchange inside a warp (PTX ISA 9.7.9.6 shfl.sync, 9.7.13.10 vote.sync, 9.7.13.16 elect.sync). All 32 lanes take part.

namespace flash_attention::ptx {

constexpr unsigned full_warp = 0xffffffffu;

// The value is any type of 32 bits.
#define FLASH_ATTENTION_SHUFFLE(mode, clamp)                               \
  static_assert(sizeof(T) == 4, "a shuffle moves 32 bits");                \
  unsigned bits = __builtin_bit_cast(unsigned, value);                     \
  asm volatile("shfl.sync." mode ".b32 %0, %0, %1, " clamp ", 0xffffffff;" \
               : "+r"(bits)                                                \
               : "r"(static_cast<unsigned>(lane)));                        \
  return __builtin_bit_cast(T, bits)

/// shfl.sync.bfly: the value of lane `own ^ lane`.
template <typename T>
__device__ __forceinline__ T shuffle_xor(T value, int lane) {
  FLASH_ATTENTION_SHUFFLE("bfly", "31");
}

/// shfl.sync.idx: the value of that lane.
template <typename T>
__device__ __forceinline__ T shuffle(T value, int lane) {
  FLASH_ATTENTION_SHUFFLE("idx", "31");
}

/// shfl.sync.up: the value of lane `own - lane`; the own value if there is none.
template <typename T>
__device__ __forceinline__ T shuffle_up(T value, int lane) {
  FLASH_ATTENTION_SHUFFLE("up", "0");
}

#undef FLASH_ATTENTION_SHUFFLE

/// vote.sync.ballot: bit l is lane l's predicate.
__device__ __forceinline__ unsigned ballot(bool predicate) {
  unsigned lanes;
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %1, 0; vote.sync.ballot.b32 %0, p, 0xffffffff; }"
               : "=r"(lanes)
               : "r"(static_cast<int>(predicate)));
  return lanes;
}

/// vote.sync.any.
__device__ __forceinline__ bool any(bool predicate) { return ballot(predicate) != 0; }

/// vote.sync.all.
__device__ __forceinline__ bool all(bool predicate) { return ballot(predicate) == full_warp; }

/// elect.sync (sm_90): true in exactly one lane.
__device__ __forceinline__ bool elect() {
  int elected;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.s32 %0, 1, 0, p; }" : "=r"(elected));
  return elected != 0;
}

}  // namespace flash_attention::ptx
