// NEON on a machine that has none: neon_program.cpp, cross-compiled and run under an emulator of AArch64.

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

namespace {

struct Outcome {
  int status;
  std::string output;
};

Outcome run(const std::string& command) {
  Outcome outcome{-1, {}};
  FILE* pipe = popen((command + " 2>&1").c_str(), "r");
  if (pipe == nullptr) return outcome;
  char buffer[4096];
  while (const std::size_t size = fread(buffer, 1, sizeof buffer, pipe)) outcome.output.append(buffer, size);
  outcome.status = pclose(pipe);
  return outcome;
}

TEST(CpuNeon, AgreesWithGenericCode) {
  const std::string compiler = "aarch64-linux-gnu-g++";
  std::string emulator = "qemu-aarch64";
  if (run(compiler + " --version").status != 0) GTEST_SKIP() << compiler << " is not here";
  if (run(emulator + " --version").status != 0) emulator = "qemu-aarch64-static";
  if (run(emulator + " --version").status != 0) GTEST_SKIP() << "qemu-aarch64 (qemu-user) is not here";

  const std::string root = FLASH_ATTENTION_ROOT;
  const std::string program =
      (std::filesystem::temp_directory_path() / ("flash_attention_neon_" + std::to_string(getpid()))).string();
  const Outcome compiled =
      run(compiler + " -std=c++20 -O1 -static -Wall -Wextra -Werror -ffp-contract=fast -fno-math-errno -I" + root +
          "/src -I" + root + "/include " + root + "/src/cpu/isa/neon.cpp " + root + "/src/cpu/isa/generic.cpp " + root +
          "/tests/cpu/neon_program.cpp -o " + program);
  ASSERT_EQ(compiled.status, 0) << compiled.output;
  const Outcome ran = run(emulator + " " + program);
  std::filesystem::remove(program);
  EXPECT_EQ(ran.status, 0) << ran.output;
}

}  // namespace
