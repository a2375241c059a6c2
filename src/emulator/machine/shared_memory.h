#pragma once

#include <cstddef>
#include <vector>

namespace flash_attention::emulator {

struct Thread;

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
  unsigned char* async() {
    settle();
    return async_.data();
  }
  std::size_t size() const { return size_; }

  /// fence.proxy.async: the asynchronous view becomes equal to the generic one, at the latest when it is read, when the
  /// warp's step ends (`settle`) or before the thread's next store. The lanes of a warp fence one after another; one copy
  /// serves them all.
  void publish(const Thread& thread) { publisher_ = &thread; }
  void before_store_of(const Thread& thread) {
    if (publisher_ == &thread) settle();
  }
  void settle();
  void write_both(std::size_t offset, const void* from, std::size_t bytes);  ///< into both views
  bool overrun() const;  ///< bytes between the end and the page that faults were written
  bool guards(const void* address) const;

 private:
  std::size_t size_ = 0;
  std::size_t mapped_ = 0;
  unsigned char* memory_ = nullptr;
  unsigned char* generic_ = nullptr;
  std::vector<unsigned char> async_;
  const Thread* publisher_ = nullptr;  // the last thread whose fence is not copied yet
};

}  // namespace flash_attention::emulator
