#include <deque>

#include "cuda/memory.h"
#include "flash_attention/error.h"
#include "support/oracle/memory.h"

namespace flash_attention::testing {
namespace {

class CudaMemory : public Memory {
 public:
  explicit CudaMemory(int index) : index_(index) {}

  void* allocate(std::size_t bytes) override {
    blocks_.emplace_back(index_, bytes > 0 ? bytes : 1);
    return blocks_.back().data();
  }
  void write(void* device, const void* host, std::size_t bytes) override {
    if (bytes) block(device).upload(host, bytes, offset(device));
  }
  void read(void* host, const void* device, std::size_t bytes) override {
    cuda::synchronize(index_);
    if (bytes) block(device).download(host, bytes, offset(device));
  }

 private:
  cuda::DeviceMemory& block(const void* device) {
    for (cuda::DeviceMemory& block : blocks_) {
      const char* first = static_cast<const char*>(block.data());
      if (device >= first && device < first + block.size()) return block;
    }
    throw Error(ErrorCode::internal, "not memory of this test");
  }
  std::size_t offset(const void* device) {
    return static_cast<std::size_t>(static_cast<const char*>(device) - static_cast<const char*>(block(device).data()));
  }

  int index_;
  std::deque<cuda::DeviceMemory> blocks_;
};

}  // namespace

std::unique_ptr<Memory> cuda_memory(int index) { return std::make_unique<CudaMemory>(index); }

}  // namespace flash_attention::testing
