// A program of its own: the settings are read once.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "flash_attention/attention.h"

namespace flash_attention {
namespace {

TEST(EmulatorWithoutCompiler, SaysHowToGetOne) {
  const auto folder = std::filesystem::temp_directory_path() / ("flash_attention_no_compiler_" + std::to_string(getpid()));
  setenv("FLASH_ATTENTION_CXX", "no-such-compiler", 1);
  setenv("FLASH_ATTENTION_CACHE_DIR", folder.c_str(), 1);
  const Problem problem{.seq_q = 4, .seq_kv = 4, .head_dim = 8};
  float q[32] = {}, k[32] = {}, v[32] = {}, out[32];
  try {
    forward(problem, {.q = q, .k = k, .v = v, .out = out}, {.device = {.kind = DeviceKind::emulator}});
    ADD_FAILURE() << "it ran";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unavailable);
    EXPECT_NE(std::string(error.what()).find("'no-such-compiler' cannot be run"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("FLASH_ATTENTION_CXX"), std::string::npos) << error.what();
  }
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace flash_attention
