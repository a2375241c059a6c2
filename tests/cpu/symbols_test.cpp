// The objects of an instruction set must share no function with the rest: the linker keeps one copy of an inline function,
// and if that is the one compiled for AVX-512, a machine without it dies in code that has nothing to do with it.

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <filesystem>
#include <set>
#include <sstream>
#include <string>

namespace {

std::string output_of(const std::string& command) {
  std::string text;
  if (FILE* pipe = popen((command + " 2>/dev/null").c_str(), "r")) {
    char buffer[4096];
    while (const std::size_t size = fread(buffer, 1, sizeof buffer, pipe)) text.append(buffer, size);
    if (pclose(pipe) != 0) text.clear();
  }
  return text;
}

TEST(CpuSymbols, EachInstructionSetExportsItsTableAndNothingElse) {
  const auto library =
      std::filesystem::read_symlink("/proc/self/exe").parent_path().parent_path() / "libflash_attention_internal.a";
  if (output_of("nm --version").empty()) GTEST_SKIP() << "nm (binutils) is not here";
  std::istringstream lines(output_of("nm -C -A --defined-only '" + library.string() + "'"));
  std::set<std::string> tables;
  const std::string isas[] = {"generic", "neon", "avx2", "avx512", "avx512_bf16", "amx"};
  for (std::string line; std::getline(lines, line);) {
    // library.a:avx2.cpp.o:0000000000000000 D flash_attention::cpu::avx2_table
    const auto member = line.find(".a:") + 3;
    const std::string object = line.substr(member, line.find(".cpp.o:") - member);
    if (std::find(std::begin(isas), std::end(isas), object) == std::end(isas)) continue;
    const auto kind_at = line.find(' ') + 1;
    const char kind = line[kind_at];
    const std::string name = line.substr(kind_at + 2);
    if (std::islower(static_cast<unsigned char>(kind)) != 0 && kind != 'w' && kind != 'v' && kind != 'u')
      continue;  // local
    EXPECT_EQ(name, "flash_attention::cpu::" + object + "_table") << "exported as '" << kind << "' by " << object;
    tables.insert(object);
  }
  EXPECT_TRUE(tables.contains("generic")) << "no object was found in " << library;
#if defined(__x86_64__)
  EXPECT_TRUE(tables.contains("avx2") && tables.contains("avx512"));
#endif
}

}  // namespace
