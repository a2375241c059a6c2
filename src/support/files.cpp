#include "support/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
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

std::string owned_by(const std::filesystem::path& path, uid_t owner) {
  return path.string() + " belongs to user " + std::to_string(owner) + ", not to user " + std::to_string(::geteuid());
}

/// Why code must not be loaded from a file or folder with that owner and mode.
std::optional<std::string> why_untrusted(const std::filesystem::path& path, const struct stat& status,
                                         const Trust& trust = {}) {
  const bool same_owner = trust.in_library && status.st_uid == trust.owner;
  if (status.st_uid != ::geteuid() && status.st_uid != 0 && !same_owner) return owned_by(path, status.st_uid);
  const bool same_group = trust.in_library && status.st_gid == trust.group;
  const mode_t allowed = trust.writers & (same_group ? S_IWGRP | S_IWOTH : S_IWOTH);
  if ((status.st_mode & (S_IWGRP | S_IWOTH) & ~allowed) != 0) {
    return path.string() + " can be written by other users; chmod go-w makes it safe";
  }
  return std::nullopt;
}

/// If anybody may write to a folder, anybody can replace the folders in it, unless it is sticky.
std::optional<std::string> why_replaceable(const std::filesystem::path& folder) {
  for (std::filesystem::path above = folder.parent_path(); above.has_relative_path(); above = above.parent_path()) {
    struct stat status;
    if (::stat(above.c_str(), &status) != 0) return failure("cannot look at", above);
    if ((status.st_mode & S_IWOTH) != 0 && (status.st_mode & S_ISVTX) == 0) {
      return above.string() + ", above " + folder.string() + ", can be written by every user";
    }
  }
  return std::nullopt;
}

std::optional<std::string> read_all(int fd, std::size_t size) {
  std::string bytes(size, '\0');
  std::size_t filled = 0;
  while (filled < bytes.size()) {
    const ssize_t got = ::read(fd, bytes.data() + filled, bytes.size() - filled);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return std::nullopt;
    if (got == 0) break;
    filled += static_cast<std::size_t>(got);
  }
  bytes.resize(filled);
  return bytes;
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
  return read_all(file.get(), static_cast<std::size_t>(status.st_size));
}

Trust trust_in(const std::filesystem::path& library) {
  struct stat status;
  if (::stat(library.c_str(), &status) != 0) return {};
  return {true, status.st_uid, status.st_gid, status.st_mode & (S_IWGRP | S_IWOTH)};
}

TrustedFile read_trusted_file(const std::filesystem::path& path, const Trust& trust) {
  // Check and read the same file: the one of this descriptor, whatever the name refers to later. A pipe must not block.
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (file.get() < 0 && errno == ENOENT) return {};
  if (file.get() < 0 && errno == ELOOP) return {std::nullopt, path.string() + " is a link"};
  struct stat status;
  if (file.get() < 0 || ::fstat(file.get(), &status) != 0) return {std::nullopt, failure("cannot read", path)};
  if (!S_ISREG(status.st_mode)) return {std::nullopt, path.string() + " is not a file"};
  if (auto reason = why_untrusted(path, status, trust)) return {std::nullopt, std::move(*reason)};
  return {read_all(file.get(), static_cast<std::size_t>(status.st_size)), {}};
}

std::optional<std::string> write_file_atomically(const std::filesystem::path& path, std::string_view bytes) {
  static std::atomic<unsigned> count{0};
  std::filesystem::path temporary = path;
  temporary += std::string(temporary_mark) + std::to_string(::getpid()) + "-" + std::to_string(count++);

  const Descriptor file(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (file.get() < 0) return failure("cannot create", temporary);
  // The data must be on the disk before the name. Otherwise a power cut could leave the name on an empty file.
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

std::filesystem::path without_temporary_mark(const std::filesystem::path& path) {
  const std::string name = path.filename().string();
  const std::size_t mark = name.rfind(temporary_mark);
  const std::size_t dash = name.rfind('-');  // MARK, process, dash, count
  if (mark == std::string::npos || dash <= mark + temporary_mark.size()) return path;
  const auto is_number = [](std::string_view text) {
    return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
  };
  const std::size_t process = mark + temporary_mark.size();
  const std::string_view view = name;
  if (!is_number(view.substr(process, dash - process)) || !is_number(view.substr(dash + 1))) return path;
  return path.parent_path() / name.substr(0, mark);
}

bool is_temporary(const std::filesystem::path& path) { return without_temporary_mark(path) != path; }

std::optional<std::string> why_untrusted(const std::filesystem::path& path, const Trust& trust) {
  struct stat status;
  if (::stat(path.c_str(), &status) != 0) return failure("cannot look at", path);
  return why_untrusted(path, status, trust);
}

std::optional<std::string> prepare_private_folder(const std::filesystem::path& folder) {
  std::error_code error;
  if (folder.has_parent_path()) std::filesystem::create_directories(folder.parent_path(), error);
  if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) return failure("cannot create the folder", folder);
  struct stat link, status;
  if (::lstat(folder.c_str(), &link) != 0) return failure("cannot look at", folder);
  // In a folder that others can write to, such as /tmp, another user's link could lead to any folder of this user.
  if (S_ISLNK(link.st_mode) && link.st_uid != ::geteuid() && link.st_uid != 0) {
    return folder.string() + " is a link of user " + std::to_string(link.st_uid) + "; it is not followed";
  }
  if (::stat(folder.c_str(), &status) != 0) return failure("cannot look at", folder);
  if (!S_ISDIR(status.st_mode)) return folder.string() + " is not a folder";
  if (status.st_uid != ::geteuid()) return owned_by(folder, status.st_uid);
  if (auto reason = why_replaceable(std::filesystem::absolute(folder, error))) return reason;
  return why_untrusted(folder, status);
}

std::variant<std::filesystem::path, std::string> private_temporary_folder() {
  std::error_code error;
  std::filesystem::path base = std::filesystem::temp_directory_path(error);  // fails if TMPDIR is not a folder
  if (error) base = "/tmp";
  std::filesystem::path folder = base / ("flash_attention-" + std::to_string(::geteuid()));
  const auto problem = prepare_private_folder(folder);
  if (!problem) return folder;
  std::string fresh = (base / "flash_attention-XXXXXX").string();  // the usual name belongs to another user
  if (::mkdtemp(fresh.data()) == nullptr) return *problem + "; " + failure("cannot create", fresh);
  return std::filesystem::path(fresh);
}

}  // namespace flash_attention::support
