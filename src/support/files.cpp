#include "support/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

namespace flash_attention::support {
namespace {

constexpr std::string_view temporary_mark = ".temporary-";

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

std::string failure(const char* what, const std::filesystem::path& path) {
  return std::string(what) + " " + path.string() + ": " + std::strerror(errno);
}

bool write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    bytes.remove_prefix(static_cast<std::size_t>(written));
  }
  return true;
}

}  // namespace

std::optional<std::string> read_file(const std::filesystem::path& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat status;
  if (file.get() < 0 || ::fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode)) return std::nullopt;
  std::string bytes(static_cast<std::size_t>(status.st_size), '\0');
  std::size_t filled = 0;
  while (filled < bytes.size()) {
    const ssize_t got = ::read(file.get(), bytes.data() + filled, bytes.size() - filled);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return std::nullopt;
    if (got == 0) break;
    filled += static_cast<std::size_t>(got);
  }
  bytes.resize(filled);
  return bytes;
}

std::optional<std::string> write_file_atomically(const std::filesystem::path& path, std::string_view bytes) {
  static std::atomic<unsigned> count{0};
  std::filesystem::path temporary = path;
  temporary += std::string(temporary_mark) + std::to_string(::getpid()) + "-" + std::to_string(count++);

  const Descriptor file(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (file.get() < 0) return failure("cannot create", temporary);
  // The data must be on the disk before the name is, or a power cut could leave the name on an empty file.
  if (!write_all(file.get(), bytes) || ::fsync(file.get()) != 0) {
    std::string message = failure("cannot write", temporary);
    ::unlink(temporary.c_str());
    return message;
  }
  if (::rename(temporary.c_str(), path.c_str()) != 0) {
    std::string message = failure("cannot rename to", path);
    ::unlink(temporary.c_str());
    return message;
  }
  return std::nullopt;
}

bool is_temporary(const std::filesystem::path& path) {
  return path.filename().string().find(temporary_mark) != std::string::npos;
}

std::optional<std::string> why_untrusted(const std::filesystem::path& path) {
  struct stat status;
  if (::stat(path.c_str(), &status) != 0) return failure("cannot look at", path);
  if (status.st_uid != ::geteuid() && status.st_uid != 0) {
    return path.string() + " belongs to user " + std::to_string(status.st_uid) + ", not to user " +
           std::to_string(::geteuid());
  }
  if ((status.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    return path.string() + " can be written by other users; chmod go-w makes it safe";
  }
  return std::nullopt;
}

std::optional<std::string> prepare_private_folder(const std::filesystem::path& folder) {
  std::error_code error;
  if (folder.has_parent_path()) std::filesystem::create_directories(folder.parent_path(), error);
  if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) return failure("cannot create the folder", folder);
  struct stat status;
  if (::stat(folder.c_str(), &status) != 0) return failure("cannot look at", folder);
  if (!S_ISDIR(status.st_mode)) return folder.string() + " is not a folder";
  if (status.st_uid != ::geteuid()) {
    return folder.string() + " belongs to user " + std::to_string(status.st_uid) + ", not to user " +
           std::to_string(::geteuid());
  }
  return why_untrusted(folder);
}

}  // namespace flash_attention::support
