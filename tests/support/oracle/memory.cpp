#include "support/oracle/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <new>

#include "flash_attention/error.h"

namespace flash_attention::testing {
namespace {

/// Each block ends, up to its alignment, at a page that may not be touched.
class HostMemory : public Memory {
 public:
  ~HostMemory() override {
    for (const auto& [base, bytes] : maps_) munmap(base, bytes);
  }

  void* allocate(std::size_t bytes) override {
    const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t used = (bytes + 255) / 256 * 256;
    const std::size_t body = (used + page - 1) / page * page;
    void* base = mmap(nullptr, body + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) throw std::bad_alloc();
    mprotect(static_cast<char*>(base) + body, page, PROT_NONE);
    maps_.emplace_back(base, body + page);
    return static_cast<char*>(base) + body - used;
  }
  void write(void* device, const void* host, std::size_t bytes) override {
    if (bytes) std::memcpy(device, host, bytes);
  }
  void read(void* host, const void* device, std::size_t bytes) override {
    if (bytes) std::memcpy(host, device, bytes);
  }

 private:
  std::vector<std::pair<void*, std::size_t>> maps_;
};

}  // namespace

/// In cuda_memory.cpp.
std::unique_ptr<Memory> cuda_memory(int index);

std::unique_ptr<Memory> memory_of(Device device) {
  if (device.kind == DeviceKind::cuda) return cuda_memory(device.index);
  return std::make_unique<HostMemory>();
}

}  // namespace flash_attention::testing
