#include "support/settings.h"

#include <gtest/gtest.h>

#include <map>

#include "flash_attention/error.h"
#include "support/folder.h"

namespace flash_attention::support {
namespace {

Settings read(const std::map<std::string, std::string>& variables) {
  return read_settings([&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

TEST(Settings, defaults) {
  const Settings settings = read({{"HOME", "/home/ada"}});
  EXPECT_EQ(settings.cache_dir, "/home/ada/.cache/flash_attention");
  EXPECT_EQ(settings.cache_limit_bytes, 1 << 30);
  EXPECT_TRUE(settings.jit);
  EXPECT_EQ(settings.threads, 0);
  EXPECT_EQ(settings.cxx, "c++");
  EXPECT_FALSE(settings.cpu_isa.has_value());
  EXPECT_TRUE(settings.nvrtc.empty());
}

TEST(Settings, cache_folder_comes_from_the_nearest_variable) {
  EXPECT_EQ(read({{"HOME", "/h"}, {"XDG_CACHE_HOME", "/x"}}).cache_dir, "/x/flash_attention");
  EXPECT_EQ(read({{"HOME", "/h"}, {"XDG_CACHE_HOME", "relative"}}).cache_dir, "/h/.cache/flash_attention");
  EXPECT_EQ(read({{"XDG_CACHE_HOME", "/x"}, {"FLASH_ATTENTION_CACHE_DIR", "/c"}}).cache_dir, "/c");
  EXPECT_TRUE(read({}).cache_dir.is_absolute());
}

TEST(Settings, folders_that_code_is_loaded_from_are_full_paths) {
  const Settings settings = read(
      {{"HOME", "."}, {"CUDA_HOME", "cuda"}, {"CUDA_PATH", "./cuda"}, {"CONDA_PREFIX", ".."}, {"VIRTUAL_ENV", ".venv"}});
  for (const auto& folder : {settings.home, settings.cuda_home, settings.conda_prefix, settings.virtual_env}) {
    EXPECT_TRUE(folder.empty()) << folder;
  }
  EXPECT_TRUE(settings.cache_dir.is_absolute());
  EXPECT_EQ(read({{"CUDA_HOME", "cuda"}, {"CUDA_PATH", "/opt/cuda"}}).cuda_home, "/opt/cuda");
}

TEST(Settings, values) {
  const Settings settings = read({{"FLASH_ATTENTION_CACHE_LIMIT", "64M"},
                                  {"FLASH_ATTENTION_JIT", "off"},
                                  {"FLASH_ATTENTION_CPU_ISA", "avx512"},
                                  {"FLASH_ATTENTION_THREADS", "12"},
                                  {"FLASH_ATTENTION_THREAD_SOURCE", "own"},
                                  {"FLASH_ATTENTION_INVARIANT", "1"},
                                  {"FLASH_ATTENTION_TUNED", "off"},
                                  {"FLASH_ATTENTION_QUALIFY", "force"},
                                  {"FLASH_ATTENTION_RECORD", "calls.jsonl"},
                                  {"FLASH_ATTENTION_EMULATOR_SEED", "18446744073709551615"},
                                  {"FLASH_ATTENTION_CXX", "clang++"},
                                  {"FLASH_ATTENTION_CXX_FLAGS", "-g -O0"},
                                  {"CUDA_PATH", "/opt/cuda"}});
  EXPECT_EQ(settings.cache_limit_bytes, 64 << 20);
  EXPECT_FALSE(settings.jit);
  EXPECT_FALSE(settings.tuned);
  EXPECT_EQ(settings.qualify, Qualify::always);
  EXPECT_EQ(settings.record, "calls.jsonl");
  EXPECT_EQ(settings.cpu_isa, CpuIsa::avx512);
  EXPECT_EQ(settings.threads, 12);
  EXPECT_EQ(settings.thread_source, ThreadSource::own);
  EXPECT_EQ(settings.emulator_seed, 18446744073709551615ull);
  EXPECT_EQ(settings.cxx, "clang++");
  EXPECT_EQ(settings.cxx_flags, "-g -O0");
  EXPECT_EQ(settings.cuda_home, "/opt/cuda");
}

TEST(Settings, an_empty_variable_is_not_set) {
  EXPECT_TRUE(read({{"FLASH_ATTENTION_JIT", ""}}).jit);
  EXPECT_EQ(read({{"FLASH_ATTENTION_THREADS", ""}}).threads, 0);
}

TEST(Settings, bad_values_are_refused_by_name) {
  const std::pair<const char*, const char*> bad[] = {
      {"FLASH_ATTENTION_CACHE_LIMIT", "many"},   {"FLASH_ATTENTION_CACHE_LIMIT", "-1"},
      {"FLASH_ATTENTION_CACHE_LIMIT", "1T"},     {"FLASH_ATTENTION_CACHE_LIMIT", "9999999999999G"},
      {"FLASH_ATTENTION_JIT", "maybe"},          {"FLASH_ATTENTION_CPU_ISA", "sse"},
      {"FLASH_ATTENTION_THREADS", "0"},          {"FLASH_ATTENTION_THREADS", "4097"},
      {"FLASH_ATTENTION_QUALIFY", "2"},          {"FLASH_ATTENTION_THREADS", "4 "},
      {"FLASH_ATTENTION_EMULATOR_SEED", "-1"},   {"FLASH_ATTENTION_EMULATOR_SEED", "0x1"},
      {"FLASH_ATTENTION_THREAD_SOURCE", "torch"}};
  for (const auto& [variable, value] : bad) {
    try {
      read({{variable, value}});
      ADD_FAILURE() << variable << "=" << value << " was accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      EXPECT_NE(std::string(error.what()).find(std::string(variable) + ": '" + value + "'"), std::string::npos)
          << error.what();
      EXPECT_NE(std::string(error.what()).find("allowed: "), std::string::npos) << error.what();
    }
  }
}

TEST(Settings, every_variable_is_documented) {
  const std::string page = testing::read_text(std::filesystem::path(FLASH_ATTENTION_ROOT) / "docs/jit.md");
  for (const SettingDescription& description : setting_descriptions()) {
    EXPECT_NE(page.find("`" + std::string(description.variable) + "`"), std::string::npos) << description.variable;
  }
}

}  // namespace
}  // namespace flash_attention::support
