#pragma once

#include <sys/types.h>

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

namespace flash_attention::support {

/// The bytes of a file, or nothing if it cannot be read.
std::optional<std::string> read_file(const std::filesystem::path& path);

/// A file with code: its bytes, or why they must not be used. Neither if there is no such file.
struct TrustedFile {
  std::optional<std::string> bytes;
  std::string refused;
};

/// Whose code runs already, in addition to this user's and root's: the owner of a library that the process has loaded.
/// Files next to the library are as trustworthy as the library, if they have the same owner and the same writers.
struct Trust {
  bool in_library = false;  // otherwise only this user and root are trusted
  uid_t owner = 0;
  gid_t group = 0;
  mode_t writers = 0;
};
Trust trust_in(const std::filesystem::path& library);

/// Reads a file that belongs to this user or root (or that is trusted) and that no other user can write to. Follows no
/// link.
TrustedFile read_trusted_file(const std::filesystem::path& path, const Trust& trust = {});

/// Replaces `path` with `bytes`, so that no reader and no crash ever sees a part of them: writes a temporary file next
/// to it, flushes it to the disk, and renames it. Returns what failed, or nothing on success.
std::optional<std::string> write_file_atomically(const std::filesystem::path& path, std::string_view bytes);

/// Whether the name is that of a temporary file of write_file_atomically. A killed process may leave one.
bool is_temporary(const std::filesystem::path& path);
// the name that the temporary file was for; other names stay
std::filesystem::path without_temporary_mark(const std::filesystem::path& path);

/// Creates the folder (mode 0700) and its parents if needed. Returns why it cannot be used: it is not a folder, belongs
/// to another user, is another user's link, is writable by other users, or is below a folder in which every user can
/// replace it. Returns nothing if all is well.
std::optional<std::string> prepare_private_folder(const std::filesystem::path& folder);

/// A private folder for temporary files: flash_attention-UID in TMPDIR or /tmp; one with a new name if that one is not
/// trustworthy. The other alternative says what failed.
std::variant<std::filesystem::path, std::string> private_temporary_folder();

/// Why code must not be loaded from a file or folder: it belongs to neither this user nor root, or others may write to
/// it.
std::optional<std::string> why_untrusted(const std::filesystem::path& path, const Trust& trust = {});

}  // namespace flash_attention::support
