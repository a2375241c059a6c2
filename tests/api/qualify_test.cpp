#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "flash_attention/attention.h"
#include "flash_attention/runtime.h"
#include "support/child.h"
#include "support/folder.h"

// The whole way of a kernel that was never run on such a GPU, in the emulator of sm_80: tested at its first use, kept, and
// not used where it is wrong. The planted mistake is in a copy of the kernels' sources.

namespace flash_attention::testing {
namespace {

constexpr Device emulated{.kind = DeviceKind::emulator, .emulated_arch = 80};

const Problem tested{.seq_q = 40, .seq_kv = 40, .head_dim = 64, .dtype = Dtype::bfloat16};

/// In a process of its own: settings are read once.
std::string outcome(const std::string& cache, const std::string& kernels, const char* when) {
  const ChildResult child = run_in_child([&] {
    ::setenv("FLASH_ATTENTION_CACHE_DIR", cache.c_str(), 1);
    ::setenv("FLASH_ATTENTION_QUALIFY", when, 1);
    if (!kernels.empty()) ::setenv("FLASH_ATTENTION_KERNEL_DIR", kernels.c_str(), 1);
    static std::string log;
    set_log_callback([](std::string_view message, void*) { log += std::string(message) + '\n'; }, nullptr);
    workspace_bytes(tested, Pass::forward, {.device = emulated});
    workspace_bytes(tested, Pass::forward, {.device = emulated});
    return explain(tested, Pass::forward, {.device = emulated}) + log;
  });
  EXPECT_EQ(child.exit_code, 0) << child.output;
  return child.output;
}

std::size_t times(const std::string& text, const std::string& what) {
  std::size_t found = 0;
  for (std::size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++found;
  return found;
}

TEST(Qualify, a_planted_mistake_is_found_at_the_first_use_and_once) {
  const TemporaryFolder folder;
  const std::filesystem::path kernels = folder / "kernels";
  std::filesystem::copy(std::filesystem::path(FLASH_ATTENTION_ROOT) / "kernels", kernels,
                        std::filesystem::copy_options::recursive);
  const std::filesystem::path file = kernels / "forward/sm80/kernel.cuh";
  std::string text = read_text(file);
  const std::string right = "score.unit_scale() * tile::log2_e;";
  ASSERT_NE(text.find(right), std::string::npos) << "the planted mistake needs another place";
  write_text(file, text.replace(text.find(right), right.size(), "score.unit_scale() * tile::log2_e * 1.05f;"));
  const std::string wrong = outcome((folder / "cache").string(), kernels.string(), "force");
  EXPECT_NE(wrong.find("kernel     forward/portable"), std::string::npos) << wrong;
  EXPECT_NE(wrong.find("forward/sm80: failed its self-test on this GPU"), std::string::npos) << wrong;
  EXPECT_EQ(times(wrong, "is not used on"), 1u) << wrong;
  // The verdict is another process's, too; and a right kernel that is tested again is used.
  const std::string later = outcome((folder / "cache").string(), "", "1");
  EXPECT_NE(later.find("kernel     forward/portable"), std::string::npos) << later;
  EXPECT_EQ(times(later, "is tested on"), 0u) << later;
  const std::string right_again = outcome((folder / "cache").string(), "", "force");
  EXPECT_NE(right_again.find("kernel     forward/sm80"), std::string::npos) << right_again;
  EXPECT_EQ(times(right_again, "is tested on"), 1u) << right_again;
}

}  // namespace
}  // namespace flash_attention::testing
