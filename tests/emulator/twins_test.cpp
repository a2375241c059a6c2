#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <set>
#include <string_view>

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

bool in_a_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

/// The functions that a header of kernels/ptx defines: the last word before the first bracket after __forceinline__.
std::set<std::string> wrappers_in(std::string_view text) {
  constexpr std::string_view mark = "__forceinline__ ";
  std::set<std::string> names;
  for (std::size_t at = text.find(mark); at != text.npos; at = text.find(mark, at + 1)) {
    std::string_view head = text.substr(at, text.find('(', at) - at);
    if (head.ends_with('>')) head = head.substr(0, head.rfind('<'));
    const auto first = std::find_if_not(head.rbegin(), head.rend(), in_a_word).base();
    names.emplace(first, head.end());
  }
  names.erase("operator");
  names.erase("");
  return names;
}

/// Whether the text has the name as a word, then a bracket, or template arguments and a bracket.
bool calls(std::string_view text, std::string_view name) {
  for (std::size_t at = text.find(name); at != text.npos; at = text.find(name, at + 1)) {
    std::string_view rest = text.substr(at + name.size());
    if (at > 0 && in_a_word(text[at - 1])) continue;
    if (rest.starts_with('<')) rest = rest.substr(std::min(rest.find(">("), rest.size() - 1) + 1);
    if (rest.starts_with('(')) return true;
  }
  return false;
}

TEST(Wrappers, HaveATwinAndACase) {
  // What asks the compiler or the cache for something and changes no value.
  const std::set<std::string> without_effect{"wgmma_pin",          "tmem_pin",           "hide_from_compiler",
                                             "registers_increase", "registers_decrease", "prefetch_l2",
                                             "tma_prefetch",       "tma_prefetch_4d",    "path"};
  const WrapperCases& cases = wrapper_cases();
  int wrappers = 0;
  for (const jit::EmbeddedFile& file : jit::embedded_files()) {
    if (!file.name.starts_with("ptx/")) continue;
    const std::string twin = text_of_file("emulator/" + std::string(file.name));
    EXPECT_FALSE(twin.empty()) << file.name << " has no twin";
    for (const std::string& name : wrappers_in(file.text)) {
      ++wrappers;
      EXPECT_TRUE(calls(twin, name)) << name << " of " << file.name << " has no twin";
      if (without_effect.contains(name)) continue;
      const bool used =
          std::any_of(cases.begin(), cases.end(), [&](const WrapperCase& c) { return calls(text_of(c), name); });
      EXPECT_TRUE(used) << name << " of " << file.name << " has no case in tests/emulator/cases";
    }
  }
  EXPECT_GT(wrappers, 60);
}

}  // namespace
}  // namespace flash_attention::testing
