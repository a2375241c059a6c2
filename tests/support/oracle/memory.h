#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "flash_attention/device.h"

namespace flash_attention::testing {

/// Memory of the device under test. What is allocated lives as long as this object.
class Memory {
 public:
  virtual ~Memory() = default;
  virtual void* allocate(std::size_t bytes) = 0;  // 256-byte aligned, never null
  virtual void write(void* device, const void* host, std::size_t bytes) = 0;
  virtual void read(void* host, const void* device, std::size_t bytes) = 0;  // after all work is done
};

/// Host memory for the CPU and the emulator, GPU memory for CUDA.
std::unique_ptr<Memory> memory_of(Device device);

}  // namespace flash_attention::testing
