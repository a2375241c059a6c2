#include "jit/entry.h"

#include <cstdint>
#include <cstring>

#include "support/sha256.h"

namespace flash_attention::jit {
namespace {

struct Trailer {
  char magic[8];
  std::uint32_t format;
  std::uint32_t trailer_bytes;
  std::uint64_t payload_bytes;
  std::uint64_t facts_bytes;
  support::Sha256 hash;  // of payload and facts
};
static_assert(sizeof(Trailer) == 64);

constexpr char magic[8] = {'F', 'L', 'A', 'S', 'H', 'A', 'T', 'T'};
constexpr std::uint32_t format = 1;

/// Removes the first line of the text, with its newline, and returns it.
std::string take_line(std::string_view& text) {
  const std::size_t end = text.find('\n');
  std::string line(text.substr(0, end));
  text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  return line;
}

}  // namespace

std::string encode(const Entry& entry) {
  const std::string facts = entry.name + "\n" + entry.content + "\n" + entry.compiler + "\n" + entry.notes;
  std::string bytes = entry.payload + facts;
  Trailer trailer{{}, format, sizeof(Trailer), entry.payload.size(), facts.size(), support::sha256(bytes)};
  std::memcpy(trailer.magic, magic, sizeof(magic));
  bytes.append(reinterpret_cast<const char*>(&trailer), sizeof(trailer));
  return bytes;
}

std::optional<Entry> decode(std::string_view bytes) {
  Trailer trailer;
  if (bytes.size() < sizeof(trailer)) return std::nullopt;
  std::memcpy(&trailer, bytes.data() + bytes.size() - sizeof(trailer), sizeof(trailer));
  const std::string_view body = bytes.substr(0, bytes.size() - sizeof(trailer));
  if (std::memcmp(trailer.magic, magic, sizeof(magic)) != 0 || trailer.format != format ||
      trailer.trailer_bytes != sizeof(trailer) || trailer.payload_bytes > body.size() ||
      trailer.facts_bytes != body.size() - trailer.payload_bytes || trailer.hash != support::sha256(body)) {
    return std::nullopt;
  }
  std::string_view facts = body.substr(trailer.payload_bytes);
  Entry entry;
  entry.name = take_line(facts);
  entry.content = take_line(facts);
  entry.compiler = take_line(facts);
  entry.notes = facts;
  entry.payload = body.substr(0, trailer.payload_bytes);
  return entry;
}

}  // namespace flash_attention::jit
