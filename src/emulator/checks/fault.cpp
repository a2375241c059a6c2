#include "emulator/checks/fault.h"

#include <signal.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdlib>
#include <mutex>

#include "emulator/machine/scheduler.h"

namespace flash_attention::emulator {
namespace {

constexpr std::size_t signal_stack_bytes = 64 * 1024;

std::mutex faults_mutex;
int guards = 0;
struct sigaction former_segv, former_bus;

/// The thread goes on in Scheduler::fail_fault, at the top of its stack. Its own work is given up.
void leave_to(void* context, void (*landing)(), void* stack_top) {
  auto* state = static_cast<ucontext_t*>(context);
  const auto top = reinterpret_cast<std::uintptr_t>(stack_top) / 16 * 16 - 1024;
#if defined(__x86_64__)
  state->uc_mcontext.gregs[REG_RIP] = static_cast<greg_t>(reinterpret_cast<std::uintptr_t>(landing));
  state->uc_mcontext.gregs[REG_RSP] = static_cast<greg_t>(top - 8);
#else
  state->uc_mcontext.pc = reinterpret_cast<std::uintptr_t>(landing);
  state->uc_mcontext.sp = top;
#endif
}

void handle(int signal, siginfo_t* info, void* context) {
  if (void* stack_top = Scheduler::note_fault(info->si_addr)) return leave_to(context, Scheduler::fail_fault, stack_top);
  // The fault is not ours: restore the earlier handler. The access is tried again.
  sigaction(signal, signal == SIGSEGV ? &former_segv : &former_bus, nullptr);
}

}  // namespace

FaultGuard::FaultGuard() {
  stack_ = std::malloc(signal_stack_bytes);
  stack_t stack{}, former{};
  stack.ss_sp = stack_;
  stack.ss_size = signal_stack_bytes;
  sigaltstack(&stack, &former);  // the thread's own stack may have overflowed
  former_stack_ = former.ss_sp;
  former_size_ = former.ss_size;
  former_flags_ = former.ss_flags;

  const std::lock_guard lock(faults_mutex);
  if (guards++ > 0) return;
  struct sigaction action {};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigaction(SIGSEGV, &action, &former_segv);
  sigaction(SIGBUS, &action, &former_bus);
}

FaultGuard::~FaultGuard() {
  {
    const std::lock_guard lock(faults_mutex);
    if (--guards == 0) {
      sigaction(SIGSEGV, &former_segv, nullptr);
      sigaction(SIGBUS, &former_bus, nullptr);
    }
  }
  stack_t former{};
  former.ss_sp = former_stack_;
  former.ss_size = former_size_;
  former.ss_flags = former_flags_;
  sigaltstack(&former, nullptr);
  std::free(stack_);
}

}  // namespace flash_attention::emulator
