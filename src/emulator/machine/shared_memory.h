#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace flash_attention::emulator {

/// The shared memory of one block: filled with NaN patterns, ending at a page that faults. It is seen in two ways, as on
/// the hardware: the generic view is what loads and stores reach; the asynchronous one is what TMA and wgmma read. A store
/// comes into the second by fence.proxy.async alone; asynchronous writes come into both.
class SharedMemory {
 public:
  SharedMemory() = default;
  ~SharedMemory();
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory(const SharedMemory&) = delete;

  void reset(std::size_t bytes);  ///< that many bytes, all of them NaN

  unsigned char* generic() const { return generic_; }
  unsigned char* async() { return async_.data(); }
  std::size_t size() const { return size_; }

  /// fence.proxy.async: the asynchronous view becomes equal to the generic one. At once: a plain store that follows is seen
  /// by no one here, so a copy that came later would have it, and a fence before the write would go unnoticed.
  void publish();
  std::uint64_t published() const { return published_; }                     ///< how often
  void write_both(std::size_t offset, const void* from, std::size_t bytes);  ///< into both views
  /// The first of these bytes that a store has changed and no fence.proxy.async has published; -1: there is none.
  std::ptrdiff_t unfenced(std::size_t offset, std::size_t bytes) const;
  bool overrun() const;  ///< bytes between the end and the page that faults were written
  bool guards(const void* address) const;

 private:
  std::size_t size_ = 0;
  std::size_t mapped_ = 0;
  unsigned char* memory_ = nullptr;
  unsigned char* generic_ = nullptr;
  std::vector<unsigned char> async_;
  std::uint64_t published_ = 0;
};

}  // namespace flash_attention::emulator
