#pragma once

#include "emulator/machine/fiber.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace flash_attention::emulator {

#if defined(__x86_64__)
// Only the registers that a call preserves are moved; the compiler takes care of the others. swapcontext would make a
// system call each time. There is no call and no return, because the processor predicts a return from earlier calls,
// which were another fiber's. The function is inlined, so each switch has its own target to predict, and the lanes of a
// warp return to the same places one after another.
[[gnu::always_inline]] inline void switch_registers(void** save, void* load) {
  asm volatile(
      "lea -128(%%rsp), %%rsp\n"  // the space below the stack pointer that a function may use
      "push %%rbp\n"
      "push %%rbx\n"
      "lea 1f(%%rip), %%rax\n"
      "push %%rax\n"
      "mov %%rsp, (%0)\n"
      "mov %1, %%rsp\n"
      "pop %%rax\n"
      "jmp *%%rax\n"
      "1:\n"
      "pop %%rbx\n"
      "pop %%rbp\n"
      "lea 128(%%rsp), %%rsp\n"
      : "+D"(save), "+S"(load)
      :
      : "rax", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "memory", "cc", "xmm0", "xmm1", "xmm2",
        "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");
}
#elif defined(__aarch64__)
extern "C" void flash_attention_switch_fiber(void** save, void* load);  // fiber.cpp
inline void switch_registers(void** save, void* load) { flash_attention_switch_fiber(save, load); }
#else
#error "The emulator needs a switch of registers for this processor."
#endif

/// Saves the state of the current stack in *save, then continues at `load`, which is on the stack `to`.
[[gnu::always_inline]] inline void switch_stack(void** save, void* load, [[maybe_unused]] const StackIdentity& to) {
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(to.thread_sanitizer, 0);
#endif
#if defined(__SANITIZE_ADDRESS__)
  void* fake_stack = nullptr;
  __sanitizer_start_switch_fiber(&fake_stack, to.bottom, to.size);
#endif
  switch_registers(save, load);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
}

}  // namespace flash_attention::emulator
