#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace flash_attention::jit {

/// One kernel source in the form that compilers take. Kernel sources include each other by their name below kernels/.
struct SourceFile {
  std::string name;  // "tile/softmax.cuh"
  std::string text;
};

/// The file and everything that it includes, sorted by name. It is read from the library itself, or from `kernel_dir`
/// (kernels/ of a source tree) if that is not empty. Throws Error(invalid_argument) if the file does not exist.
std::vector<SourceFile> sources_of(const std::string& name, const std::filesystem::path& kernel_dir);

/// All files that a text includes, directly or indirectly: the union of sources_of for each name in it, sorted by name.
std::vector<SourceFile> sources_of_text(const std::string& text, const std::filesystem::path& kernel_dir);

/// The file that holds a unit: "forward/portable" -> "forward/portable.cuh". Throws Error(invalid_argument).
std::string file_of_unit(const std::string& unit, const std::filesystem::path& kernel_dir);

}  // namespace flash_attention::jit
