#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace flash_attention::emulator {

/// The shared memory of one block. It is filled with NaN patterns and ends at a page that faults. As on the hardware
/// there are two views: loads and stores use the generic view; TMA and wgmma read the asynchronous view. A store
/// reaches the asynchronous view only by fence.proxy.async; asynchronous writes reach both views.
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

  /// fence.proxy.async: the asynchronous view becomes equal to the generic view, at once. If this happened later, it
  /// would include later plain stores, which are not observed, and a fence before the write would not be noticed.
  void publish();
  std::uint64_t published() const { return published_; }                     ///< how often
  void write_both(std::size_t offset, const void* from, std::size_t bytes);  ///< into both views
  /// The first of these bytes that a store has changed and no fence.proxy.async has published; -1: none.
  std::ptrdiff_t unfenced(std::size_t offset, std::size_t bytes) const;
  bool overrun() const;  ///< whether bytes between the end and the page that faults were written
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
