#include "emulator/machine/fiber.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <mutex>
#include <utility>

#include "emulator/machine/page.h"
#include "flash_attention/error.h"

#if defined(__aarch64__)
asm(R"(
.text
.globl flash_attention_switch_fiber
.hidden flash_attention_switch_fiber
.type flash_attention_switch_fiber, %function
flash_attention_switch_fiber:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size flash_attention_switch_fiber, .-flash_attention_switch_fiber
)");
#endif

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace flash_attention::emulator {
namespace {

// Bytes between the tops of neighbouring lanes' stacks, modulo a page. It is an odd number of cache lines, so that 32
// lanes begin at 32 places of a page (EPYC, 2 cores, covering array of backward/sm80, compiled: 20.7 CPU seconds; with
// equal places 23.5).
constexpr int colour_bytes = 64 * 5, num_colours = 64;

struct SpareStacks {
  std::mutex mutex;
  std::vector<FiberStack> stacks;
};
SpareStacks& spare_stacks() {
  static SpareStacks& spare = *new SpareStacks;
  return spare;
}

/// A thread that failed has left its frames on the stack. Forgets their red zones, so that the next thread there does
/// not hit them.
void forget_frames([[maybe_unused]] const void* stack, [[maybe_unused]] std::size_t size) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(stack, size);
#endif
}

}  // namespace

StackIdentity current_stack() {
  StackIdentity identity;
#if defined(__SANITIZE_THREAD__)
  identity.thread_sanitizer = __tsan_get_current_fiber();
#endif
  return identity;
}

void enter_fiber([[maybe_unused]] StackIdentity& from) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &from.bottom, &from.size);
#endif
}

FiberStack::FiberStack() {
  void* memory =
      mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  if (memory == MAP_FAILED) throw Error(ErrorCode::out_of_memory, "the emulator could not map a stack for a thread");
  memory_ = static_cast<std::byte*>(memory);
  mprotect(memory_, page_bytes, PROT_NONE);
  identity_ = {memory_, size, nullptr};
#if defined(__SANITIZE_THREAD__)
  identity_.thread_sanitizer = __tsan_create_fiber(0);
#endif
}

FiberStack::~FiberStack() {
#if defined(__SANITIZE_THREAD__)
  if (memory_ != nullptr) __tsan_destroy_fiber(identity_.thread_sanitizer);
#endif
  if (memory_ == nullptr) return;
  forget_frames(memory_, size);
  munmap(memory_, size);
}

FiberStack::FiberStack(FiberStack&& other) noexcept
    : memory_(std::exchange(other.memory_, nullptr)), identity_(other.identity_) {}

FiberStack& FiberStack::operator=(FiberStack&& other) noexcept {
  std::swap(memory_, other.memory_);
  std::swap(identity_, other.identity_);
  return *this;
}

std::vector<FiberStack> take_stacks(std::size_t count) {
  std::vector<FiberStack> stacks;
  {
    SpareStacks& spare = spare_stacks();
    const std::lock_guard lock(spare.mutex);
    const auto kept = static_cast<std::ptrdiff_t>(spare.stacks.size() - std::min(count, spare.stacks.size()));
    std::move(spare.stacks.begin() + kept, spare.stacks.end(), std::back_inserter(stacks));
    spare.stacks.erase(spare.stacks.begin() + kept, spare.stacks.end());
  }
  stacks.resize(count);
  return stacks;
}

void leave_stacks(std::vector<FiberStack> stacks) {
  SpareStacks& spare = spare_stacks();
  const std::lock_guard lock(spare.mutex);
  std::move(stacks.begin(), stacks.end(), std::back_inserter(spare.stacks));
}

void* FiberStack::prepare(void (*entry)(), int colour) const {
  forget_frames(memory_, size);
  auto* top = reinterpret_cast<std::uintptr_t*>(memory_ + size - colour % num_colours * colour_bytes);
#if defined(__x86_64__)
  top -= 1;  // as if `entry` had been called: its return address (here none) is at a multiple of 16, minus 8
  top[0] = 0;
  *--top = reinterpret_cast<std::uintptr_t>(entry);
#else
  top -= 20;
  for (int i = 0; i < 20; ++i) top[i] = 0;
  top[11] = reinterpret_cast<std::uintptr_t>(entry);  // x30
#endif
  return top;
}

bool FiberStack::guards(const void* address) const {
  const auto* byte = static_cast<const std::byte*>(address);
  return byte >= memory_ && byte < memory_ + page_bytes;
}

}  // namespace flash_attention::emulator
