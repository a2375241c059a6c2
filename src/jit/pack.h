#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "support/files.h"

namespace flash_attention::jit {

/// Cache files of one stem in one compressed file, "STEM.pack". Kernels that differ in a few options are similar:
/// together they take a seventh of the space that they take separately. tools/kernel_packs.py makes it.
///
///     LZMA of:   a line "NAME BYTES" for each file | an empty line | the files, one after another
class Pack {
 public:
  struct File {
    std::string name;
    std::string_view bytes;
  };

  /// Returns nothing if there is no such file, or if it is damaged or untrusted, which is logged. A pack is read once
  /// and stays in memory.
  static std::shared_ptr<const Pack> open(const std::filesystem::path& path, const support::Trust& trust);

  const std::vector<File>& files() const { return files_; }

 private:
  static std::shared_ptr<const Pack> read(const std::filesystem::path& path, const support::Trust& trust);

  std::string content_;
  std::vector<File> files_;
};

/// The ending of the names of packs.
inline constexpr std::string_view pack_ending = ".pack";

}  // namespace flash_attention::jit
