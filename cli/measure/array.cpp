#include "cli/measure/array.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "cli/output/format.h"
#include "flash_attention/error.h"

namespace flash_attention::cli {
namespace {

[[noreturn]] void refuse(std::size_t bytes) {
  throw Error(ErrorCode::out_of_memory, "out of memory: no room for " + format_bytes(static_cast<double>(bytes)) +
                                            " of a tensor; make the problem smaller");
}

}  // namespace

Array::Array(Device device, std::size_t bytes) : bytes_(bytes) {
  const std::size_t rounded = std::max<std::size_t>(256, (bytes + 255) / 256 * 256);
  host_.reset(std::aligned_alloc(256, rounded));
  if (!host_) refuse(bytes);
  std::memset(host_.get(), 0xff, rounded);  // NaN in every element type: a result that was not written shows
  if (!device_traits(device).host_memory) {
    on_gpu_ = std::make_unique<cuda::DeviceMemory>(device.index, rounded);
    upload();
  }
}

void Array::upload() const {
  if (on_gpu_) on_gpu_->upload(host_.get(), bytes_);
}

void Array::download() const {
  if (on_gpu_) on_gpu_->download(host_.get(), bytes_);
}

std::shared_ptr<void> device_block(Device device, std::size_t bytes) {
  if (bytes == 0) return nullptr;
  if (!device_traits(device).host_memory) {
    const auto memory = std::make_shared<cuda::DeviceMemory>(device.index, bytes);
    return {memory, memory->data()};
  }
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) refuse(bytes);
  return {memory, [bytes](void* block) { munmap(block, bytes); }};
}

}  // namespace flash_attention::cli
