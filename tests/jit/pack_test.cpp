#include "jit/pack.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include "support/folder.h"

namespace flash_attention::jit {
namespace {

using testing::TemporaryFolder;
using testing::write_text;

std::string from_hex(std::string_view digits) {
  std::string bytes;
  for (std::size_t i = 0; i < digits.size(); i += 2)
    bytes += static_cast<char>(std::stoi(std::string(digits.substr(i, 2)), nullptr, 16));
  return bytes;
}

// By Python's lzma.compress(..., format=FORMAT_ALONE): "a.cubin 3\nb.cubin 2\n\nabcde", and "\n".
constexpr std::string_view two_files =
    "5d00008000ffffffffffffffff00308b8867937e561a9aad8caad96d37f8f1fedb4c544f0bdda9ffff5f540000";
constexpr std::string_view no_files = "5d00008000ffffffffffffffff000541fbffffffe0000000";

std::shared_ptr<const Pack> written(const TemporaryFolder& folder, std::string_view digits) {
  static int count = 0;  // a pack is read once
  const auto path = folder / ("demo" + std::to_string(count++) + ".pack");
  write_text(path, from_hex(digits));
  return Pack::open(path, {});
}

TEST(Pack, its_files) {
  const TemporaryFolder folder;
  const auto pack = written(folder, two_files);
  ASSERT_NE(pack, nullptr);
  ASSERT_EQ(pack->files().size(), 2u);
  EXPECT_EQ(pack->files()[0].name, "a.cubin");
  EXPECT_EQ(pack->files()[0].bytes, "abc");
  EXPECT_EQ(pack->files()[1].name, "b.cubin");
  EXPECT_EQ(pack->files()[1].bytes, "de");
  ASSERT_NE(written(folder, no_files), nullptr);
  EXPECT_TRUE(written(folder, no_files)->files().empty());
}

TEST(Pack, is_read_once) {
  const TemporaryFolder folder;
  write_text(folder / "once.pack", from_hex(two_files));
  const auto pack = Pack::open(folder / "once.pack", {});
  std::filesystem::remove(folder / "once.pack");
  EXPECT_EQ(Pack::open(folder / "once.pack", {}), pack);
}

TEST(Pack, without_a_file_there_is_none) {
  const TemporaryFolder folder;
  EXPECT_EQ(Pack::open(folder / "none.pack", {}), nullptr);
}

TEST(Pack, damaged_ones_are_none) {
  const TemporaryFolder folder;
  const struct {
    const char* what;
    std::string_view digits;
  } cases[] = {
      {"no LZMA", "00112233445566778899"},
      {"cut off", two_files.substr(0, two_files.size() - 20)},
      {"lines without an end", "5d00008000ffffffffffffffff00308b8867937e561a9aad8cdb468dffffde600000"},
      {"a file that is longer than what is left",
       "5d00008000ffffffffffffffff00308b8867937e561a9aae934c3249708a20e9ffff32b00000"},
      {"bytes behind the last file", "5d00008000ffffffffffffffff00308b8867937e561a9aac86b03249708a20e9ffff32b00000"},
      {"a name without a size", "5d00008000ffffffffffffffff00308b8867937e561a7288ca2456ffffc6210000"},
      {"a size that is no number", "5d00008000ffffffffffffffff00308b8867937e561a9aadcc409f9f47dd9eefa8ffff8dcc0000"},
      {"a size below zero", "5d00008000ffffffffffffffff00308b8867937e561a9aa77e9a086c25c7c89667ffff895c0000"},
  };
  for (const auto& [what, digits] : cases) EXPECT_EQ(written(folder, digits), nullptr) << what;
}

TEST(Pack, one_that_others_may_write_to_is_none) {
  const TemporaryFolder folder;
  write_text(folder / "open.pack", from_hex(two_files));
  ASSERT_EQ(::chmod((folder / "open.pack").c_str(), 0666), 0);
  EXPECT_EQ(Pack::open(folder / "open.pack", {}), nullptr);
}

}  // namespace
}  // namespace flash_attention::jit
