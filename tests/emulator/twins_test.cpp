#include <gtest/gtest.h>

#include <regex>
#include <set>

#include "emulator/wrapper_cases.h"
#include "jit/embedded.h"

// Every wrapper of kernels/ptx has a twin in src/emulator/runtime/ptx and a case that runs it.
namespace flash_attention::testing {
namespace {

std::string text_of_file(const std::string& name) {
  for (const jit::EmbeddedFile& file : jit::embedded_files()) {
    if (file.name == name) return std::string(file.text);
  }
  return {};
}

/// The functions that a header of kernels/ptx defines.
std::set<std::string> wrappers_in(const std::string& text) {
  static const std::regex definition(R"(__forceinline__ [\w<>:& ]*?\b(\w+)(<\w+>)?\()");
  std::set<std::string> names;
  for (std::sregex_iterator match(text.begin(), text.end(), definition), end; match != end; ++match)
    names.insert((*match)[1]);
  names.erase("operator");
  return names;
}

TEST(Wrappers, HaveATwinAndACase) {
  // What asks the compiler or the cache for something and changes no value.
  const std::set<std::string> without_effect{"wgmma_pin",   "registers_fresh", "registers_increase", "registers_decrease",
                                             "prefetch_l2", "fence_grid",      "tma_prefetch"};
  const WrapperCases cases = wrapper_cases();
  int wrappers = 0;
  for (const jit::EmbeddedFile& file : jit::embedded_files()) {
    if (!file.name.starts_with("ptx/")) continue;
    const std::string twin = text_of_file("emulator/" + std::string(file.name));
    EXPECT_FALSE(twin.empty()) << file.name << " has no twin";
    for (const std::string& name : wrappers_in(std::string(file.text))) {
      ++wrappers;
      const std::regex call("\\b" + name + "(<[^;]*>)?\\(");
      EXPECT_TRUE(std::regex_search(twin, call)) << name << " of " << file.name << " has no twin";
      if (without_effect.contains(name)) continue;
      const bool used = std::any_of(cases.begin(), cases.end(),
                                    [&](const WrapperCase& c) { return std::regex_search(text_of(c), call); });
      EXPECT_TRUE(used) << name << " of " << file.name << " has no case in tests/emulator/cases";
    }
  }
  EXPECT_GT(wrappers, 60);
}

}  // namespace
}  // namespace flash_attention::testing
