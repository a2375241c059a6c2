#include "support/lzma.h"

#include <gtest/gtest.h>

namespace flash_attention::support {
namespace {

constexpr std::size_t plenty = 1 << 20;

std::string from_hex(std::string_view digits) {
  std::string bytes;
  for (std::size_t i = 0; i < digits.size(); i += 2)
    bytes += static_cast<char>(std::stoi(std::string(digits.substr(i, 2)), nullptr, 16));
  return bytes;
}

/// What the streams below hold.
std::string song() {
  std::string text;
  for (int i = 9; i > 0; --i) {
    const std::string bottles = std::to_string(i) + " bottles of beer";
    text += bottles + " on the wall, " + bottles + "; ";
  }
  return text;
}

// Made by Python's lzma: FORMAT_ALONE with the usual contexts, and with none of literals but two bits of their places.
constexpr std::string_view usual =
    "5d00000004ffffffffffffffff001c8808c7e221989a0a4e5b92afd5cb5e0b6751871779b33a479a1b84a0297a3f379c0ea104d69c872d"
    "fbf88563e41930f44ee72611ca66aea63c070f81eb42d73f064874dd676458ace52e7c64ffda5ac000";
constexpr std::string_view other_contexts =
    "1200008000ffffffffffffffff001c884971439c881dcb42432d3cc11cdbca78c0bdbc0935cd0b1ce91a5dc64e7f12a0be9205eda602ab"
    "6e26ffd78995038441dbb8b2f3ebe12a9757d9cb6bb4fdc77944c8b4493454f54db35e3dffe787d000";
constexpr std::string_view nothing = "5d00008000ffffffffffffffff0083fffbffffc0000000";

TEST(Lzma, what_another_program_compressed) {
  EXPECT_EQ(decompress_lzma(from_hex(usual), plenty), song());
  EXPECT_EQ(decompress_lzma(from_hex(other_contexts), plenty), song());
  EXPECT_EQ(decompress_lzma(from_hex(nothing), plenty), "");
}

TEST(Lzma, the_size_may_be_known) {
  std::string bytes = from_hex(usual);
  for (std::size_t i = 0; i < 8; ++i) bytes[5 + i] = static_cast<char>(song().size() >> 8 * i & 0xFF);
  EXPECT_EQ(decompress_lzma(bytes, plenty), song());
  EXPECT_EQ(decompress_lzma(bytes, song().size() - 1), std::nullopt) << "more than is allowed";
}

TEST(Lzma, no_more_than_the_limit) { EXPECT_EQ(decompress_lzma(from_hex(usual), song().size() / 2), std::nullopt); }

TEST(Lzma, a_stream_that_ends_early_is_refused) {
  const std::string whole = from_hex(usual);
  for (std::size_t size = 0; size < whole.size(); ++size)
    EXPECT_EQ(decompress_lzma(whole.substr(0, size), plenty), std::nullopt) << size;
}

TEST(Lzma, whatever_the_bits_are_it_ends) {
  for (const std::string_view stream : {usual, other_contexts}) {
    const std::string whole = from_hex(stream);
    for (std::size_t bit = 0; bit < 8 * whole.size(); ++bit) {
      std::string damaged = whole;
      damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ 1 << bit % 8);
      const auto found = decompress_lzma(damaged, plenty);
      EXPECT_LE(found ? found->size() : 0, plenty);
    }
  }
}

}  // namespace
}  // namespace flash_attention::support
