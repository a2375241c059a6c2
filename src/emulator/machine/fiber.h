#pragma once

#include <cstddef>
#include <vector>

namespace flash_attention::emulator {

/// A stack as the sanitizers have to be told of it.
struct StackIdentity {
  const void* bottom = nullptr;
  std::size_t size = 0;
  void* thread_sanitizer = nullptr;
};

/// The stack of one emulated thread: mapped on demand, with a page below it that faults.
class FiberStack {
 public:
  FiberStack();
  ~FiberStack();
  FiberStack(FiberStack&& other) noexcept;
  FiberStack& operator=(FiberStack&& other) noexcept;
  FiberStack(const FiberStack&) = delete;

  /// A stack pointer from which switch_fiber enters `entry` (which never returns). Stacks are aligned alike: without
  /// another `colour` for each lane, the frames of all lanes of a warp compete for the same few lines of the cache.
  void* prepare(void (*entry)(), int colour) const;

  bool guards(const void* address) const;  ///< in the page that faults
  std::byte* top() const { return memory_ + size; }
  const StackIdentity& identity() const { return identity_; }
  static constexpr std::size_t size = 512 * 1024;

 private:
  std::byte* memory_ = nullptr;
  StackIdentity identity_;
};

/// Stacks that an earlier launch left, and new ones: to map them and to touch their pages takes longer than a small block.
std::vector<FiberStack> take_stacks(std::size_t count);
void leave_stacks(std::vector<FiberStack> stacks);

/// The stack that this OS thread runs on, as far as it can be known before the first switch.
StackIdentity current_stack();

/// The first thing on a new fiber: completes what is known of the stack that it was entered from.
void enter_fiber(StackIdentity& from);

}  // namespace flash_attention::emulator
