#pragma once

namespace flash_attention::emulator {

/// During its life, a bad memory access of a kernel on this OS thread becomes an error of that kernel instead of the
/// end of the process. Other faults go to the earlier handler.
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
