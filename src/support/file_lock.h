#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>

namespace flash_attention::support {

/// A lock between processes, and between threads, on one of 2^62 slots of a file. The system releases it if the holder
/// dies. One file has all slots, so locks leave nothing to clean up.
class FileLock {
 public:
  /// Waits at most `patience` for the slot. Empty if the slot stayed locked or the file cannot be opened.
  static std::optional<FileLock> acquire(const std::filesystem::path& file, std::uint64_t slot,
                                         std::chrono::milliseconds patience);
  FileLock(FileLock&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  FileLock& operator=(FileLock&&) = delete;
  ~FileLock();

 private:
  explicit FileLock(int fd) : fd_(fd) {}
  int fd_;
};

}  // namespace flash_attention::support
