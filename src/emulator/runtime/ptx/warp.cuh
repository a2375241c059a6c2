#pragma once

// Emulated: kernels/ptx/warp.cuh.

namespace flash_attention::ptx {

constexpr unsigned full_warp = 0xffffffffu;

template <typename T>
inline T shuffle_by(emulator::ShuffleMode mode, T value, int lane) {
  static_assert(sizeof(T) == 4, "a shuffle moves 32 bits");
  emulator::ShuffleOperand operand{mode, lane, __builtin_bit_cast(unsigned, value)};
  emulator::table->warp(emulator::WarpOp::shuffle, &operand);
  return __builtin_bit_cast(T, operand.value);
}

template <typename T>
inline T shuffle_xor(T value, int lane) {
  return shuffle_by(emulator::ShuffleMode::exclusive_or, value, lane);
}
template <typename T>
inline T shuffle(T value, int lane) {
  return shuffle_by(emulator::ShuffleMode::index, value, lane);
}
template <typename T>
inline T shuffle_up(T value, int lane) {
  return shuffle_by(emulator::ShuffleMode::up, value, lane);
}

inline unsigned ballot(bool predicate) {
  emulator::VoteOperand operand{predicate, 0};
  emulator::table->warp(emulator::WarpOp::vote, &operand);
  return operand.lanes;
}
inline bool any(bool predicate) { return ballot(predicate) != 0; }
inline bool all(bool predicate) { return ballot(!predicate) == 0; }

inline bool elect() {
  emulator::VoteOperand operand{};
  emulator::table->warp(emulator::WarpOp::elect, &operand);
  return operand.predicate;
}

}  // namespace flash_attention::ptx
