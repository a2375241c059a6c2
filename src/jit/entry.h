#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace flash_attention::jit {

/// One file of the cache:
///
///     payload | facts, as text | trailer of 64 bytes: magic, format, sizes, sha256 of payload and facts
///
/// The payload comes first, so tools and dlopen, which ignore what follows an ELF image, can take the file as it is.
struct Entry {
  std::string name;      // Recipe::name
  std::string content;   // hash of Recipe::content, in hexadecimal
  std::string compiler;  // Recipe::compiler
  std::string notes;
  std::string payload;
};

std::string encode(const Entry& entry);

/// Nothing where a single bit differs from what encode gave.
std::optional<Entry> decode(std::string_view bytes);

}  // namespace flash_attention::jit
