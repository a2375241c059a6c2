#pragma once

#include <cstddef>
#include <vector>

namespace flash_attention::emulator {

/// The description of a stack for the sanitizers.
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

  /// Returns a stack pointer from which switch_fiber enters `entry` (which never returns). All stacks have the same
  /// alignment: without a different `colour` for each lane, the frames of all lanes of a warp would compete for the
  /// same few lines of the cache.
  void* prepare(void (*entry)(), int colour) const;

  bool guards(const void* address) const;  ///< whether it is in the page that faults
  std::byte* top() const { return memory_ + size; }
  const StackIdentity& identity() const { return identity_; }
  static constexpr std::size_t size = 512 * 1024;

 private:
  std::byte* memory_ = nullptr;
  StackIdentity identity_;
};

/// Reuses stacks of an earlier launch, and makes new ones. Mapping them and touching their pages takes longer than a
/// small block.
std::vector<FiberStack> take_stacks(std::size_t count);
void leave_stacks(std::vector<FiberStack> stacks);

/// The stack of this OS thread, as far as it can be known before the first switch.
StackIdentity current_stack();

/// Called first on a new fiber: completes the description of the stack that it was entered from.
void enter_fiber(StackIdentity& from);

}  // namespace flash_attention::emulator
