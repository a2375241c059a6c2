#pragma once

namespace flash_attention::emulator {

/// While one lives on an OS thread, a bad memory access of the kernel that runs there becomes an error of that kernel
/// instead of the end of the process. Faults of anything else go where they went before.
class FaultGuard {
 public:
  FaultGuard();
  ~FaultGuard();
  FaultGuard(const FaultGuard&) = delete;
  FaultGuard& operator=(const FaultGuard&) = delete;

 private:
  void* former_stack_ = nullptr;
  unsigned long former_size_ = 0;
  int former_flags_ = 0;
  void* stack_ = nullptr;
};

}  // namespace flash_attention::emulator
