#pragma once

#include <string>

#include "cuda/driver.h"

namespace flash_attention::cuda {

/// "cuLaunchKernelEx: CUDA_ERROR_ILLEGAL_ADDRESS (700): an illegal memory access ...; <the next step>".
std::string describe(const Driver& cu, Status status, const std::string& what);

/// Throws the Error of a status: out_of_memory, unavailable or device_failed.
[[noreturn]] void fail(const Driver& cu, Status status, const std::string& what);

inline void check(const Driver& cu, Status status, const char* what) {
  if (status != 0) [[unlikely]]
    fail(cu, status, what);
}

}  // namespace flash_attention::cuda
