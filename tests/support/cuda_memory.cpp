#include <list>
#include <stdexcept>

#include "cuda/memory.h"
#include "support/memory.h"

namespace flash_attention::testing {
namespace {

class CudaMemory : public Memory {
 public:
  explicit CudaMemory(int index) : index_(index) {}

  void* allocate(std::size_t bytes) override { return blocks_.emplace_back(index_, bytes == 0 ? 1 : bytes).data(); }

  void write(void* device, const void* host, std::size_t bytes) override {
    const auto [block, offset] = find(device);
    block->upload(host, bytes, offset);
  }

  void read(void* host, const void* device, std::size_t bytes) override {
    cuda::synchronize(index_);
    const auto [block, offset] = find(device);
    block->download(host, bytes, offset);
  }

 private:
  std::pair<cuda::DeviceMemory*, std::size_t> find(const void* address) {
    for (cuda::DeviceMemory& block : blocks_) {
      const auto offset = static_cast<std::size_t>(static_cast<const char*>(address) - static_cast<char*>(block.data()));
      if (offset < block.size()) return {&block, offset};
    }
    throw std::out_of_range("not memory of this device");
  }

  int index_;
  std::list<cuda::DeviceMemory> blocks_;
};

}  // namespace

std::unique_ptr<Memory> cuda_memory(int index) { return std::make_unique<CudaMemory>(index); }

}  // namespace flash_attention::testing
