#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "flash_attention/runtime.h"
#include "jit/product.h"
#include "support/file_lock.h"
#include "support/files.h"

namespace flash_attention::jit {

/// A folder of compiled products. A folder that is only read may contain packs of them (pack.h). The products are code,
/// so nothing is used from a folder or file that another user could have written. Any number of processes may use it at
/// the same time.
class Store {
 public:
  enum class Access { read_only, read_write };

  /// Touches nothing but the folder itself, which is created (mode 0700) if it is writable.
  Store(std::filesystem::path folder, Access access, std::int64_t limit_bytes, support::Trust trust = {});

  const std::filesystem::path& folder() const { return folder_; }
  /// Why the folder is not used; empty if it is.
  const std::string& problem() const { return problem_; }

  /// The product, verified. A damaged file is removed (if allowed), reported, and counts as not found.
  std::optional<Artifact> find(const Recipe& recipe) const;

  /// Keeps the product and its source. Returns its path, or an empty path if it could not be kept (which is reported).
  std::filesystem::path keep(const Recipe& recipe, const Product& product) const;

  /// A lock on this recipe between all processes that use the folder.
  std::optional<support::FileLock> lock(const Recipe& recipe, std::chrono::milliseconds patience) const;

  std::vector<CacheEntry> entries() const;
  std::int64_t clear() const;  // returns the bytes freed

 private:
  std::optional<Artifact> load(const std::filesystem::path& path, const Recipe& recipe) const;
  std::optional<Artifact> verified(std::string_view bytes, const std::filesystem::path& path, const Recipe& recipe) const;
  std::optional<Artifact> find_packed(const Recipe& recipe, const std::function<bool(const std::string&)>& is_wanted) const;
  void add_packed(std::vector<CacheEntry>& entries) const;
  void make_room() const;

  std::filesystem::path folder_;
  Access access_;
  std::int64_t limit_bytes_;
  support::Trust trust_;
  std::string problem_;
};

}  // namespace flash_attention::jit
