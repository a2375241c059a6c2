#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "backend/backend.h"
#include "flash_attention/error.h"

namespace flash_attention::tuning {

/// Memory on the device, with its copy on the host. They are the same if the device's memory is the host's.
class Block {
 public:
  Block() = default;
  Block(const Backend& backend, const Device& device, std::size_t bytes) : backend_(&backend), device_(device), bytes_(bytes) {
    const std::size_t rounded = std::max<std::size_t>(256, (bytes + 255) / 256 * 256);
    host_.reset(std::aligned_alloc(256, rounded), std::free);
    if (!host_) throw Error(ErrorCode::out_of_memory, "no memory for a tensor of " + std::to_string(bytes) + " bytes");
    std::memset(host_.get(), 0xff, rounded);  // NaN in every type
    there_ = backend.allocate != nullptr ? backend.allocate(device, rounded) : host_;
  }

  template <class T = void>
  T* host() const {
    return static_cast<T*>(host_.get());
  }
  template <class T = void>
  T* there() const {
    return static_cast<T*>(there_.get());
  }
  std::size_t bytes() const { return bytes_; }

  void upload() const {
    if (backend_ != nullptr && backend_->upload != nullptr) backend_->upload(device_, there_.get(), host_.get(), bytes_);
  }
  void download() const {
    if (backend_ != nullptr && backend_->download != nullptr)
      backend_->download(device_, host_.get(), there_.get(), bytes_, nullptr);
  }

 private:
  const Backend* backend_ = nullptr;
  Device device_{};
  std::size_t bytes_ = 0;
  std::shared_ptr<void> host_, there_;
};

}  // namespace flash_attention::tuning
