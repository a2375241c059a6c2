#include "emulator/machine/shared_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "emulator/machine/page.h"
#include "flash_attention/error.h"

namespace flash_attention::emulator {
namespace {
constexpr std::size_t alignment = 1024;  // of the first byte; swizzle patterns repeat at that distance
constexpr unsigned char nan_byte = 0xff;

std::size_t round_up(std::size_t value, std::size_t multiple) { return (value + multiple - 1) / multiple * multiple; }
}  // namespace

SharedMemory::~SharedMemory() {
  if (memory_ != nullptr) munmap(memory_, mapped_);
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : size_(other.size_),
      mapped_(other.mapped_),
      memory_(std::exchange(other.memory_, nullptr)),
      generic_(other.generic_),
      async_(std::move(other.async_)),
      published_(other.published_) {}

void SharedMemory::reset(std::size_t bytes) {
  const std::size_t rounded = round_up(bytes, alignment);
  if (memory_ == nullptr) {
    mapped_ = round_up(rounded, page_bytes) + page_bytes;
    void* memory = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw Error(ErrorCode::out_of_memory, "the emulator could not map shared memory");
    memory_ = static_cast<unsigned char*>(memory);
    mprotect(memory_ + mapped_ - page_bytes, page_bytes, PROT_NONE);
  }
  size_ = bytes;
  generic_ = memory_ + mapped_ - page_bytes - rounded;
  std::memset(generic_, nan_byte, rounded);
  async_.assign(rounded, nan_byte);
}

void SharedMemory::publish() {
  std::memcpy(async_.data(), generic_, async_.size());
  ++published_;
}

void SharedMemory::write_both(std::size_t offset, const void* from, std::size_t bytes) {
  std::memcpy(generic_ + offset, from, bytes);
  std::memcpy(async_.data() + offset, from, bytes);
}

std::ptrdiff_t SharedMemory::unfenced(std::size_t offset, std::size_t bytes) const {
  if (std::memcmp(generic_ + offset, async_.data() + offset, bytes) == 0) return -1;
  return std::mismatch(generic_ + offset, generic_ + offset + bytes, async_.begin() + offset).first - generic_;
}

bool SharedMemory::overrun() const {
  return std::any_of(generic_ + size_, generic_ + async_.size(), [](unsigned char byte) { return byte != nan_byte; });
}

bool SharedMemory::guards(const void* address) const {
  const auto* byte = static_cast<const unsigned char*>(address);
  return memory_ != nullptr && byte >= memory_ + mapped_ - page_bytes && byte < memory_ + mapped_;
}

}  // namespace flash_attention::emulator
