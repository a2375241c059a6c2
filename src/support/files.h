#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

namespace flash_attention::support {

/// The bytes of a file, or nothing where it cannot be read.
std::optional<std::string> read_file(const std::filesystem::path& path);

/// Replaces `path` with `bytes` so that no reader and no crash ever sees a part of them: written to a temporary beside it,
/// flushed to the disk, renamed. Returns what failed, or nothing on success.
std::optional<std::string> write_file_atomically(const std::filesystem::path& path, std::string_view bytes);

/// The names write_file_atomically gives its temporaries; a process that was killed leaves one behind.
bool is_temporary(const std::filesystem::path& path);

/// Makes the folder (mode 0700) and its parents where needed. Returns why code must not be loaded from it or cannot be
/// written to it: not a folder, not this user's, open to writers other than this user. Nothing when all is well.
std::optional<std::string> prepare_private_folder(const std::filesystem::path& folder);

/// Why code must not be loaded from what is there: it belongs to neither this user nor root, or others may write to it.
std::optional<std::string> why_untrusted(const std::filesystem::path& path);

}  // namespace flash_attention::support
