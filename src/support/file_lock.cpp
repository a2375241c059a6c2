#include "support/file_lock.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <thread>

namespace flash_attention::support {

std::optional<FileLock> FileLock::acquire(const std::filesystem::path& file, std::uint64_t slot,
                                          std::chrono::milliseconds patience) {
  // An open-file-description lock: it belongs to this descriptor, so two threads of one process also exclude each
  // other.
  const int fd = ::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) return std::nullopt;
  FileLock lock(fd);
  struct flock range {};
  range.l_type = F_WRLCK;
  range.l_whence = SEEK_SET;
  range.l_start = static_cast<off_t>(slot >> 2);
  range.l_len = 1;

  // Polled, because a blocking wait has no time limit without signals.
  const auto deadline = std::chrono::steady_clock::now() + patience;
  std::chrono::milliseconds pause{1};
  while (::fcntl(fd, F_OFD_SETLK, &range) != 0) {
    const bool taken = errno == EAGAIN || errno == EACCES || errno == EINTR;
    if (!taken || std::chrono::steady_clock::now() >= deadline) return std::nullopt;
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, std::chrono::milliseconds{50});
  }
  return lock;
}

FileLock::~FileLock() {
  if (fd_ >= 0) ::close(fd_);
}

}  // namespace flash_attention::support
