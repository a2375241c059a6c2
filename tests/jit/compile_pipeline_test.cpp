#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <thread>

#include "flash_attention/error.h"
#include "flash_attention/runtime.h"
#include "jit/background/ahead.h"
#include "jit/cached.h"
#include "jit/compile.h"
#include "jit/diagnose.h"
#include "support/child.h"
#include "support/folder.h"

// KernelKey to machine code, with a stand-in for NVRTC. Each test runs in a child process with settings of its own.
namespace flash_attention::jit {
namespace {

using testing::ChildResult;
using testing::run_in_child;
using testing::TemporaryFolder;
using testing::write_text;

const std::string fake_nvrtc = std::string(FLASH_ATTENTION_FAKES) + "/libfake_nvrtc_13.so";
const KernelKey key{"forward/demo", "forward_demo", "ForwardConfig{.head_dim = 64}", 90, 128, 2};

class Pipeline : public ::testing::Test {
 protected:
  Pipeline() {
    write_text(folder / "kernels/forward/demo.cuh", "#include \"abi/args.h\"\n");
    write_text(folder / "kernels/abi/args.h", "");
    write_text(folder / "kernels/forward/wrong.cuh", "#error a mistake\n");
  }

  /// Runs the body with the folder's kernels, cache and log, and with the stand-in.
  ChildResult run(const std::function<std::string()>& body) const {
    return run_in_child([&] {
      ::setenv("FLASH_ATTENTION_NVRTC", fake_nvrtc.c_str(), 0);
      ::setenv("FLASH_ATTENTION_KERNEL_DIR", (folder / "kernels").c_str(), 1);
      ::setenv("FLASH_ATTENTION_CACHE_DIR", (folder / "cache").c_str(), 1);
      ::setenv("FAKE_NVRTC_LOG", (folder / "log").c_str(), 1);
      return body();
    });
  }

  std::ptrdiff_t times_compiled() const { return std::ranges::count(testing::read_text(folder / "log"), '\n'); }

  TemporaryFolder folder;
};

TEST_F(Pipeline, the_compiler_gets_the_architecture_and_the_headers) {
  const auto result = run([] { return compiled(key)->image; });
  EXPECT_EQ(
      result.output.c_str(),
      std::string(
          "image abi/args.h forward/demo.cuh --gpu-architecture=sm_90a -std=c++20 -default-device --ptxas-options=-v"));
}

TEST_F(Pipeline, memory_then_disk_then_compiler) {
  const auto first = run([] {
    const auto one = compiled(key);
    return std::to_string(one->compiled) + std::to_string(one == compiled(key)) + std::to_string(one->report.registers);
  });
  EXPECT_EQ(first.output, "1142");
  const auto second = run([] {
    const auto found = find_compiled(key);
    return std::to_string(found != nullptr) + std::to_string(compiled(key)->compiled) +
           std::to_string(compiled(key)->report.registers);
  });
  EXPECT_EQ(second.output, "1042");
  EXPECT_EQ(times_compiled(), 1);
}

TEST_F(Pipeline, an_edited_header_compiles_anew) {
  run([] { return compiled(key)->image; });
  write_text(folder / "kernels/abi/args.h", "// edited\n");
  const auto result = run([] {
    const bool missed = find_compiled(key) == nullptr;
    return std::to_string(missed) + std::to_string(compiled(key)->compiled);
  });
  EXPECT_EQ(result.output, "11");
}

TEST_F(Pipeline, more_options_make_another_kernel) {
  run([] { return compiled(key)->image; });
  const auto result = run([] {
    ::setenv("FLASH_ATTENTION_NVRTC_OPTIONS", "-lineinfo  -G", 1);
    return compiled(key)->image;
  });
  EXPECT_NE(result.output.find(" -lineinfo -G"), std::string::npos) << result.output;
}

TEST_F(Pipeline, many_ranks_compile_once) {
  ::setenv("FAKE_NVRTC_SLEEP", "200", 1);
  std::vector<std::jthread> ranks;
  for (int i = 0; i < 4; ++i) ranks.emplace_back([&] { EXPECT_EQ(run([] { return compiled(key)->image; }).exit_code, 0); });
  ranks.clear();
  ::unsetenv("FAKE_NVRTC_SLEEP");
  EXPECT_EQ(times_compiled(), 1);
}

TEST_F(Pipeline, threads_compile_once_without_a_disk_too) {
  run([] {
    ::setenv("FLASH_ATTENTION_CACHE_LIMIT", "0", 1);
    ::setenv("FAKE_NVRTC_SLEEP", "100", 1);
    std::vector<std::jthread> threads;
    for (int i = 0; i < 4; ++i) threads.emplace_back([] { compiled(key); });
    return std::string();
  });
  EXPECT_EQ(times_compiled(), 1);
}

TEST_F(Pipeline, prewarm_compiles_in_the_background) {
  const auto result = run([] {
    KernelKey other = key;
    other.arch = 80;
    const auto done = prewarm({key, other, key});
    done.get();
    return std::to_string(compiled(key)->compiled) + std::to_string(compiled(other)->compiled);
  });
  EXPECT_EQ(result.output, "11");
  EXPECT_EQ(times_compiled(), 2);
}

TEST_F(Pipeline, prewarm_hands_on_an_error) {
  const auto result = run([] {
    KernelKey wrong = key;
    wrong.unit = "forward/wrong";
    prewarm({wrong, key}).get();
    return std::string("no error");
  });
  EXPECT_NE(result.output.find("there is a mistake here"), std::string::npos) << result.output;
}

// What is compiled ahead is waited for, not compiled again; its errors are told to whoever asks.
TEST_F(Pipeline, compile_ahead_returns_at_once_and_keeps_errors_for_later) {
  const auto result = run([] {
    ::setenv("FAKE_NVRTC_SLEEP", "100", 1);
    KernelKey wrong = key;
    wrong.unit = "forward/wrong";
    compile_ahead({wrong, key});
    const bool returned_first = find_compiled(key) == nullptr;
    const bool is_new = compiled(key)->compiled;
    compile_ahead({key});  // there is nothing left to do
    try {
      compiled(wrong);
    } catch (const Error& error) {
      return std::to_string(returned_first) + std::to_string(is_new) + error.what();
    }
    return std::string("no error");
  });
  EXPECT_EQ(result.output.substr(0, 2), "11");
  EXPECT_NE(result.output.find("there is a mistake here"), std::string::npos) << result.output;
}

TEST_F(Pipeline, a_compile_error_carries_the_log_and_the_path_of_the_source) {
  const auto result = run([] {
    KernelKey wrong = key;
    wrong.unit = "forward/wrong";
    try {
      compiled(wrong);
    } catch (const Error& error) {
      return (error.code() == ErrorCode::compile_failed ? "compile_failed " : "other ") + std::string(error.what());
    }
    return std::string("compiled");
  });
  EXPECT_TRUE(result.output.starts_with("compile_failed ")) << result.output;
  EXPECT_NE(result.output.find("unit.cu(3): error: there is a mistake here"), std::string::npos) << result.output;
  const auto source = folder / "cache" / "forward_wrong_forward_demo-sm_90a-failed.cu";
  EXPECT_NE(result.output.find(source.string()), std::string::npos) << result.output;
  EXPECT_NE(testing::read_text(source).find("#include \"forward/wrong.cuh\""), std::string::npos);
}

TEST_F(Pipeline, a_newer_gpu_gets_ptx_and_an_older_one_is_refused) {
  const auto newer = run([] {
    KernelKey future = key;
    future.arch = 130;
    return compiled(future)->image + " in " + compiled(future)->path.extension().string();
  });
  EXPECT_NE(newer.output.find("ptx of image"), std::string::npos) << newer.output;
  EXPECT_NE(newer.output.find("--gpu-architecture=compute_100 "), std::string::npos) << newer.output;
  EXPECT_NE(newer.output.find(" in .ptx"), std::string::npos) << newer.output;
  const auto older = run([] {
    KernelKey past = key;
    past.arch = 70;
    return compiled(past)->image;
  });
  EXPECT_NE(older.output.find("compiles for sm_75 and later, not for sm_70"), std::string::npos) << older.output;
}

TEST_F(Pipeline, without_nvrtc_the_cache_still_serves) {
  const auto without = [] { ::setenv("FLASH_ATTENTION_NVRTC", "/nowhere/libnvrtc.so.13", 1); };
  const auto missing = run([&] {
    without();
    return compiled(key)->image;
  });
  EXPECT_EQ(missing.exit_code, 1);
  EXPECT_NE(missing.output.find("pip install nvidia-cuda-nvrtc"), std::string::npos) << missing.output;
  run([] { return compiled(key)->image; });
  const auto cached = run([&] {
    without();
    return compiled(key)->image;
  });
  EXPECT_TRUE(cached.output.starts_with("image abi/args.h")) << cached.output;
}

TEST_F(Pipeline, with_compilation_off_only_the_cache_serves) {
  const auto off = [] { ::setenv("FLASH_ATTENTION_JIT", "off", 1); };
  const auto missing = run([&] {
    off();
    return compiled(key)->image;
  });
  EXPECT_NE(missing.output.find("forward/demo sm_90a ForwardConfig{.head_dim = 64} is not in the cache"),
            std::string::npos);
  EXPECT_EQ(times_compiled(), 0);
  run([] { return compiled(key)->image; });
  const auto cached = run([&] {
    off();
    return compiled(key)->image;
  });
  EXPECT_TRUE(cached.output.starts_with("image abi/args.h")) << cached.output;
}

TEST_F(Pipeline, a_unit_that_does_not_exist_is_named) {
  const auto result = run([] {
    KernelKey absent = key;
    absent.unit = "forward/absent";
    return compiled(absent)->image;
  });
  EXPECT_NE(result.output.find("kernel unit 'forward/absent' does not exist"), std::string::npos) << result.output;
}

TEST_F(Pipeline, the_cache_can_be_listed_and_cleared) {
  const auto result = run([] {
    compiled(key);
    const auto entries = cache_entries();
    const bool listed = entries.size() == 1 && entries[0].intact && entries[0].path.starts_with(cache_directory());
    const bool freed = clear_cache() > 0;
    return entries[0].kernel + " " + std::to_string(listed) + std::to_string(freed) +
           std::to_string(cache_entries().size());
  });
  EXPECT_EQ(result.output, "forward/demo sm_90a ForwardConfig{.head_dim = 64} 110");
}

TEST_F(Pipeline, diagnosis) {
  const auto result = run([] {
    compiled(key);
    std::string text;
    for (const Finding& finding : diagnose())
      text += finding.subject + (finding.ok ? " ok " : " bad ") + finding.detail + "\n";
    return text;
  });
  EXPECT_NE(result.output.find("NVRTC ok nvrtc 13.7, "), std::string::npos) << result.output;
  EXPECT_NE(result.output.find("kernel cache ok " + (folder / "cache").string() + ": 1 kernels"), std::string::npos)
      << result.output;
}

}  // namespace
}  // namespace flash_attention::jit
