#include "jit/sources.h"

#include <map>
#include <optional>
#include <string_view>

#include "flash_attention/error.h"
#include "jit/embedded.h"
#include "support/files.h"

namespace flash_attention::jit {
namespace {

constexpr std::string_view emulator_prefix = "emulator/";

std::optional<std::string> text_of(const std::string& name, const std::filesystem::path& kernel_dir) {
  if (!kernel_dir.empty()) {
    if (name.starts_with(emulator_prefix)) {
      return support::read_file(kernel_dir / "../src/emulator/runtime" / name.substr(emulator_prefix.size()));
    }
    return support::read_file(kernel_dir / name);
  }
  for (const EmbeddedFile& file : embedded_files()) {
    if (file.name == name) return std::string(file.text);
  }
  return std::nullopt;
}

/// The names in `#include "name"` lines. Lines that a preprocessor would skip are included: one more file does no harm.
std::vector<std::string> includes_of(std::string_view text) {
  std::vector<std::string> names;
  constexpr std::string_view directive = "#include \"";
  for (std::size_t at = text.find(directive); at != std::string_view::npos; at = text.find(directive, at)) {
    at += directive.size();
    names.emplace_back(text.substr(at, text.find('"', at) - at));
  }
  return names;
}

}  // namespace

std::vector<SourceFile> sources_of(const std::string& name, const std::filesystem::path& kernel_dir) {
  if (!text_of(name, kernel_dir)) {
    throw Error(ErrorCode::invalid_argument,
                "kernel source '" + name + "' does not exist" + (kernel_dir.empty() ? "" : " in " + kernel_dir.string()));
  }
  return sources_of_text("#include \"" + name + "\"", kernel_dir);
}

std::vector<SourceFile> sources_of_text(const std::string& text, const std::filesystem::path& kernel_dir) {
  std::map<std::string, std::string> found;
  std::vector<std::string> open = includes_of(text);
  while (!open.empty()) {
    const std::string next = std::move(open.back());
    open.pop_back();
    if (found.contains(next)) continue;
    auto file = text_of(next, kernel_dir);
    if (!file) continue;  // the compiler reports it, with the line that includes it
    for (std::string& included : includes_of(*file)) open.push_back(std::move(included));
    found.emplace(next, std::move(*file));
  }
  std::vector<SourceFile> files;
  for (auto& [name, file] : found) files.push_back({name, std::move(file)});
  return files;
}

std::string file_of_unit(const std::string& unit, const std::filesystem::path& kernel_dir) {
  for (const char* ending : {".cuh", ".cu", "/kernel.cuh"}) {
    if (text_of(unit + ending, kernel_dir)) return unit + ending;
  }
  throw Error(ErrorCode::invalid_argument, "kernel unit '" + unit + "' does not exist: there is no " + unit + ".cuh, " +
                                               unit + ".cu or " + unit + "/kernel.cuh" +
                                               (kernel_dir.empty() ? "" : " in " + kernel_dir.string()));
}

}  // namespace flash_attention::jit
