#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace flash_attention::jit {

/// One file of the cache:
///
///     payload | facts, as text | trailer of 64 bytes: magic, format, sizes, sha256 of payload and facts
///
/// The payload comes first, so tools and dlopen can read the file directly: they ignore everything after an ELF image.
struct Entry {
  std::string name;      // Recipe::name
  std::string content;   // hash of Recipe::content, in hexadecimal
  std::string compiler;  // Recipe::compiler
  std::string notes;
  std::string payload;
};

std::string encode(const Entry& entry);

/// Returns nothing if a single bit differs from the result of encode.
std::optional<Entry> decode(std::string_view bytes);

}  // namespace flash_attention::jit
