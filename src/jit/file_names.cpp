#include "jit/file_names.h"

#include <algorithm>

#include "support/files.h"
#include "support/sha256.h"

namespace flash_attention::jit {
namespace {

constexpr std::size_t content_digits = 32, compiler_digits = 8;
constexpr std::string_view failed = "-failed.cu";

bool is_hex(std::string_view text) {
  return std::ranges::all_of(text, [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

/// Whether the name without its ending ends with "-CONTENT-COMPILER".
bool ends_with_hashes(std::string_view stem) {
  constexpr std::size_t tail = content_digits + compiler_digits + 2;
  if (stem.size() <= tail) return false;
  stem.remove_prefix(stem.size() - tail);
  return stem[0] == '-' && stem[content_digits + 1] == '-' && is_hex(stem.substr(1, content_digits)) &&
         is_hex(stem.substr(content_digits + 2));
}

/// Whether the name is "UNIT-sm_ARCH-failed.cu".
bool is_failed_source(std::string_view name) {
  if (!name.ends_with(failed)) return false;
  name.remove_suffix(failed.size());
  const std::size_t arch = name.rfind("-sm_");
  if (arch == std::string_view::npos || arch == 0) return false;
  std::string_view number = name.substr(arch + 4);
  if (number.ends_with('a')) number.remove_suffix(1);
  return !number.empty() && std::ranges::all_of(number, [](char c) { return c >= '0' && c <= '9'; });
}

bool is_named_by_us(const std::filesystem::path& path, bool sources_too) {
  const std::string ending = path.extension().string();
  const bool product = ending == ".cubin" || ending == ".ptx" || ending == ".so";
  return (product || (sources_too && ending == ".cu")) && ends_with_hashes(path.stem().string());
}

}  // namespace

std::string digest(std::string_view text, std::size_t digits) {
  return support::to_hex(support::sha256(text)).substr(0, digits);
}

std::string name_beginning(const Recipe& recipe) {
  return recipe.stem + "-" + digest(recipe.content, content_digits) + "-";
}

std::string file_name(const Recipe& recipe) {
  return name_beginning(recipe) + digest(recipe.compiler, compiler_digits) + "." + recipe.kind;
}

std::string failed_source_name(const std::string& stem) { return stem + std::string(failed); }

bool is_product(const std::filesystem::path& path) { return is_named_by_us(path, false); }

bool is_ours(const std::filesystem::path& path) {
  const std::filesystem::path name = support::without_temporary_mark(path);
  return is_named_by_us(name, true) || is_failed_source(name.filename().string());
}

}  // namespace flash_attention::jit
