#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>

#include "cuda/memory.h"
#include "flash_attention/device.h"

namespace flash_attention::cli {

/// Memory that both the host and a device see: one block on the CPU and the emulator, a pair of blocks for a GPU.
class Array {
 public:
  Array() = default;
  Array(Device device, std::size_t bytes);

  void* host() const { return host_.get(); }
  void* device() const { return on_gpu_ ? on_gpu_->data() : host_.get(); }
  std::size_t bytes() const { return bytes_; }

  void upload() const;    ///< host to device; does nothing if they share memory
  void download() const;  ///< device to host

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::size_t bytes_ = 0;
  std::unique_ptr<void, Free> host_;
  std::unique_ptr<cuda::DeviceMemory> on_gpu_;
};

/// Memory of the device alone, 256-byte aligned; null for 0 bytes. Pages are not touched, so that a meter sees their use.
std::shared_ptr<void> device_block(Device device, std::size_t bytes);

}  // namespace flash_attention::cli
