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

/// A file that holds code: its bytes, or why they were not taken. Neither if there is no such file.
struct TrustedFile {
  std::optional<std::string> bytes;
  std::string refused;
};

/// Whose code is run already, in addition to this user's and root's: that of a library which the process has loaded. What
/// is next to it is as good as it is, with the same owner and the same writers.
struct Trust {
  bool in_library = false;  // else in this user and root alone
  uid_t owner = 0;
  gid_t group = 0;
  mode_t writers = 0;
};
Trust trust_in(const std::filesystem::path& library);

/// Reads a file that belongs to this user or root (or that is trusted) and that no other user can write to; follows no
/// link.
TrustedFile read_trusted_file(const std::filesystem::path& path, const Trust& trust = {});

/// Replaces `path` with `bytes` so that no reader and no crash ever sees a part of them: written to a temporary next to it,
/// flushed to the disk, renamed. Returns what failed, or nothing on success.
std::optional<std::string> write_file_atomically(const std::filesystem::path& path, std::string_view bytes);

/// The names write_file_atomically gives its temporaries; a process that was killed leaves one behind.
bool is_temporary(const std::filesystem::path& path);
std::filesystem::path without_temporary_mark(const std::filesystem::path& path);  // what it is a temporary of, or itself

/// Makes the folder (mode 0700) and its parents where needed. Returns why code must not be loaded from it or cannot be
/// written to it: not a folder, not this user's, another user's link, open to writers other than this user, or below a
/// folder in which every user can put another in its place. Nothing when all is well.
std::optional<std::string> prepare_private_folder(const std::filesystem::path& folder);

/// A private folder for temporary files: flash_attention-UID in TMPDIR, else in /tmp; one with a new name where that one is
/// not to be trusted. The other alternative says what failed.
std::variant<std::filesystem::path, std::string> private_temporary_folder();

/// Why code must not be loaded from what is there: it belongs to neither this user nor root, or others may write to it.
std::optional<std::string> why_untrusted(const std::filesystem::path& path, const Trust& trust = {});

}  // namespace flash_attention::support
