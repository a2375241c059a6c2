#include "jit/entry.h"

#include <gtest/gtest.h>

namespace flash_attention::jit {
namespace {

Entry example_entry() {
  return {"forward/portable sm_90a", std::string(64, 'c'), "nvrtc 13.0", "ptxas info\nline two",
          std::string("\x7f"
                      "ELF\0code\n",
                      10)};
}

TEST(Entry, comes_back_as_it_was) {
  const Entry entry = example_entry();
  const auto back = decode(encode(entry));
  ASSERT_TRUE(back.has_value());
  EXPECT_EQ(back->name, entry.name);
  EXPECT_EQ(back->content, entry.content);
  EXPECT_EQ(back->compiler, entry.compiler);
  EXPECT_EQ(back->notes, entry.notes);
  EXPECT_EQ(back->payload, entry.payload);
}

TEST(Entry, begins_with_the_payload) { EXPECT_TRUE(encode(example_entry()).starts_with(example_entry().payload)); }

TEST(Entry, every_truncation_is_seen) {
  const std::string bytes = encode(example_entry());
  for (std::size_t size = 0; size < bytes.size(); ++size) EXPECT_FALSE(decode(bytes.substr(0, size)).has_value()) << size;
  EXPECT_FALSE(decode(bytes + "x").has_value());
}

TEST(Entry, every_flipped_bit_is_seen) {
  const std::string bytes = encode(example_entry());
  for (std::size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    std::string flipped = bytes;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
    EXPECT_FALSE(decode(flipped).has_value()) << "bit " << bit;
  }
}

TEST(Entry, empty_parts) {
  const auto back = decode(encode({}));
  ASSERT_TRUE(back.has_value());
  EXPECT_EQ(back->payload, "");
  EXPECT_EQ(back->notes, "");
}

}  // namespace
}  // namespace flash_attention::jit
