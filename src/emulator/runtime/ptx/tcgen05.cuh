#pragma once

// Emulated: kernels/ptx/tcgen05.cuh.

#include "abi/config.h"
#include "ptx/mbarrier.cuh"

namespace flash_attention::ptx {

inline void tmem_op(emulator::WarpOp op, unsigned address, int columns, unsigned* registers = nullptr) {
  emulator::TensorMemoryOperand operand{address, columns, registers};
  emulator::table->warp(op, &operand);
}

template <int columns>
inline void tmem_alloc(unsigned& address) {
  tmem_op(emulator::WarpOp::tmem_alloc, shared_address(&address), columns);
}
inline void tmem_relinquish() { emulator::table->warp(emulator::WarpOp::tmem_relinquish, nullptr); }
template <int columns>
inline void tmem_dealloc(unsigned address) {
  tmem_op(emulator::WarpOp::tmem_dealloc, address, columns);
}

template <int count>
inline void tmem_load(float (&row)[count], unsigned address) {
  static_assert(count == 16 || count == 32);
  tmem_op(emulator::WarpOp::tmem_load, address, count, reinterpret_cast<unsigned*>(row));
}
template <typename T, int count>
inline void tmem_store(unsigned address, const T (&row)[count]) {
  static_assert(sizeof(T) == 4 && (count == 16 || count == 32));
  unsigned values[count];
  for (int i = 0; i < count; ++i) values[i] = __builtin_bit_cast(unsigned, row[i]);
  tmem_op(emulator::WarpOp::tmem_store, address, count, values);
}
inline void tmem_wait_load() { emulator::table->warp(emulator::WarpOp::tmem_wait_load, nullptr); }
inline void tmem_wait_store() { emulator::table->warp(emulator::WarpOp::tmem_wait_store, nullptr); }
template <int count>
inline void tmem_pin(float (&)[count]) {}

inline void tcgen05_fence_before() { emulator::table->tensor_fence(false); }
inline void tcgen05_fence_after() { emulator::table->tensor_fence(true); }

enum class Tcgen05Major : int { k = 0, mn = 1 };

inline unsigned long long tcgen05_descriptor(const void* tile, int leading, int stride) {
  constexpr unsigned long long version = 1, swizzle_128_bytes = 2;
  return ((shared_address(tile) & 0x3ffff) >> 4) | static_cast<unsigned long long>(leading >> 4) << 16 |
         static_cast<unsigned long long>(stride >> 4) << 32 | version << 46 | swizzle_128_bytes << 61;
}

template <abi::Type type, int N, Tcgen05Major a_major, Tcgen05Major b_major>
constexpr unsigned tcgen05_shape() {
  static_assert(N % 16 == 0 && N >= 16 && N <= 256 && (type == abi::Type::float16 || type == abi::Type::bfloat16));
  constexpr unsigned element = type == abi::Type::bfloat16 ? 1 : 0, sums_fp32 = 1, M = 128;
  return sums_fp32 << 4 | element << 7 | element << 10 | static_cast<unsigned>(a_major) << 15 |
         static_cast<unsigned>(b_major) << 16 | N / 8u << 17 | M / 16 << 24;
}

inline void tcgen05_mma_ss(unsigned D, unsigned long long A, unsigned long long B, unsigned shape, bool accumulate) {
  emulator::table->tensor_product({D, false, 0, A, B, shape, accumulate});
}
inline void tcgen05_mma_ts(unsigned D, unsigned A, unsigned long long B, unsigned shape, bool accumulate) {
  emulator::table->tensor_product({D, true, A, 0, B, shape, accumulate});
}
inline void tcgen05_commit(Mbarrier& barrier) { emulator::table->tensor_commit(shared_address(&barrier)); }

}  // namespace flash_attention::ptx
