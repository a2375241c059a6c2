#pragma once

#include <filesystem>
#include <string>

namespace flash_attention::testing {

/// A new empty folder of this test's own, removed with all that is in it.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

void write_text(const std::filesystem::path& path, const std::string& text);  // makes the folders on the way
std::string read_text(const std::filesystem::path& path);

}  // namespace flash_attention::testing
