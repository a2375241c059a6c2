#include "jit/sources.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "flash_attention/error.h"
#include "jit/embedded.h"
#include "support/folder.h"

namespace flash_attention::jit {
namespace {

namespace fs = std::filesystem;
using testing::TemporaryFolder;
using testing::write_text;

std::vector<std::string> names(const std::vector<SourceFile>& files) {
  std::vector<std::string> all;
  for (const SourceFile& file : files) all.push_back(file.name);
  return all;
}

TEST(Sources, the_library_holds_every_kernel_source_byte_for_byte) {
  const fs::path root = fs::path(FLASH_ATTENTION_ROOT) / "kernels";
  std::size_t count = 0;
  for (const auto& entry : fs::recursive_directory_iterator(root)) {
    const std::string ending = entry.path().extension().string();
    if (ending != ".h" && ending != ".cuh" && ending != ".cu") continue;
    const std::string name = fs::relative(entry.path(), root).string();
    const auto embedded = embedded_files();
    const auto found = std::ranges::find(embedded, name, &EmbeddedFile::name);
    ASSERT_NE(found, embedded.end()) << name;
    EXPECT_EQ(found->text, testing::read_text(entry.path())) << name;
    ++count;
  }
  EXPECT_GT(count, 2u);
}

TEST(Sources, a_file_comes_with_all_that_it_includes) {
  const TemporaryFolder folder;
  write_text(folder / "forward/demo.cuh", "#include \"tile/a.cuh\"\n#include <missing>\n");
  write_text(folder / "tile/a.cuh", "#include \"tile/b.cuh\"\n#include \"abi/c.h\"\n");
  write_text(folder / "tile/b.cuh", "#include \"tile/a.cuh\"\n#include \"tile/absent.cuh\"\n");
  write_text(folder / "abi/c.h", "");
  write_text(folder / "tile/unused.cuh", "");
  EXPECT_EQ(names(sources_of("forward/demo.cuh", folder.path())),
            (std::vector<std::string>{"abi/c.h", "forward/demo.cuh", "tile/a.cuh", "tile/b.cuh"}));
}

TEST(Sources, a_unit_is_a_header_or_a_cu_file) {
  const TemporaryFolder folder;
  write_text(folder / "forward/demo.cuh", "");
  write_text(folder / "ladder/00_naive.cu", "");
  EXPECT_EQ(file_of_unit("forward/demo", folder.path()), "forward/demo.cuh");
  EXPECT_EQ(file_of_unit("ladder/00_naive", folder.path()), "ladder/00_naive.cu");
}

TEST(Sources, a_unit_that_does_not_exist_is_named) {
  for (const fs::path& folder : {fs::path(), fs::path("/nowhere")}) {
    try {
      file_of_unit("forward/sm1234", folder);
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      EXPECT_NE(std::string(error.what()).find("forward/sm1234.cuh"), std::string::npos) << error.what();
    }
  }
}

TEST(Sources, the_abi_is_in_the_library) {
  EXPECT_EQ(names(sources_of("abi/args.h", {})),
            (std::vector<std::string>{"abi/args.h", "abi/program.h", "abi/workspace.h"}));
}

}  // namespace
}  // namespace flash_attention::jit
