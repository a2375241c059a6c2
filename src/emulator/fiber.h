#pragma once

#include <cstddef>

namespace flash_attention::emulator {

/// The stack of one emulated thread: mapped on demand, with a page below it that faults.
class FiberStack {
 public:
  FiberStack();
  ~FiberStack();
  FiberStack(FiberStack&& other) noexcept;
  FiberStack(const FiberStack&) = delete;

  /// A stack pointer from which switch_fiber enters `entry` (which never returns).
  void* prepare(void (*entry)()) const;

  bool guards(const void* address) const;  ///< in the page that faults
  const std::byte* bottom() const { return memory_; }
  static constexpr std::size_t size = 512 * 1024;

 private:
  std::byte* memory_ = nullptr;
};

/// Saves the callee-saved registers on the current stack and its pointer in *save, then goes on from `load`.
extern "C" void flash_attention_switch_fiber(void** save, void* load);

}  // namespace flash_attention::emulator
