#pragma once

#include <string>

#include "jit/product.h"

namespace flash_attention::emulator {

/// A unit for the host's C++ compiler: what NVRTC would get, compiled against src/emulator/runtime instead of kernels/ptx.
struct HostUnit {
  std::string name;  // for people: "forward/portable sm_90a ..."
  std::string stem;  // how its files begin
  std::string text;  // defines `extern "C" __global__ void kernel(Argument)`
  int arch = 90;
  bool counts_plain_accesses = false;  // also those that no ptx:: wrapper makes: runtime/plain_access.h
};

/// The unit as a shared object, from the cache or compiled. Throws Error(unavailable) without a compiler and
/// Error(compile_failed) with its log.
jit::Artifact compile_for_host(const HostUnit& unit);

}  // namespace flash_attention::emulator
