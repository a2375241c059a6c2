#include "jit/cached.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <future>
#include <mutex>
#include <thread>

#include "flash_attention/error.h"
#include "support/child.h"
#include "support/folder.h"

namespace flash_attention::jit {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;
using testing::Child;
using testing::run_in_child;
using testing::TemporaryFolder;

constexpr uid_t nobody = 65534;

const Recipe demo_recipe{"forward/demo sm_90a", "forward_demo-sm_90a", "cubin", "content", "nvrtc 13.0"};
const std::string code(20000, 'c');

support::Settings settings_for(const TemporaryFolder& folder) {
  support::Settings settings;
  settings.cache_dir = folder / "cache";
  settings.aot_dir = folder / "ahead";
  return settings;
}

/// Produces after a while, and leaves a line in the folder's log for each time it was asked.
std::function<Product()> slow_produce(const TemporaryFolder& folder, std::chrono::milliseconds pause) {
  return [&folder, pause] {
    std::ofstream(folder / "log", std::ios::app) << "produced" << std::endl;
    std::this_thread::sleep_for(pause);
    return Product{code, "source", "notes"};
  };
}

std::ptrdiff_t times_produced(const TemporaryFolder& folder) {
  return std::ranges::count(testing::read_text(folder / "log"), '\n');
}

const auto never = []() -> Product { throw Error(ErrorCode::internal, "produced although it is in the cache"); };

TEST(ProductCache, produces_once) {
  const TemporaryFolder folder;
  const ProductCache cache(settings_for(folder));
  const Artifact first = cache.get(demo_recipe, slow_produce(folder, 0ms));
  EXPECT_TRUE(first.compiled);
  EXPECT_EQ(first.payload, code);
  const Artifact second = cache.get(demo_recipe, never);
  EXPECT_FALSE(second.compiled);
  EXPECT_EQ(second.payload, code);
  EXPECT_EQ(second.path, first.path);
}

TEST(ProductCache, many_processes_produce_once) {
  const TemporaryFolder folder;
  std::vector<Child> children;
  for (int i = 0; i < 6; ++i) {
    children.emplace_back([&] {
      const ProductCache cache(settings_for(folder));
      return cache.get(demo_recipe, slow_produce(folder, 300ms)).payload == code ? "right" : "wrong";
    });
  }
  for (Child& child : children) EXPECT_EQ(child.finish().output, "right");
  EXPECT_EQ(times_produced(folder), 1);
}

TEST(ProductCache, many_threads_produce_once) {
  const TemporaryFolder folder;
  const ProductCache cache(settings_for(folder));
  std::vector<std::jthread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&] { EXPECT_EQ(cache.get(demo_recipe, slow_produce(folder, 100ms)).payload, code); });
  threads.clear();
  EXPECT_EQ(times_produced(folder), 1);
}

TEST(ProductCache, a_process_killed_while_it_compiles_holds_up_nobody) {
  const TemporaryFolder folder;
  Child killed([&] {
    const ProductCache cache(settings_for(folder));
    return cache.get(demo_recipe, slow_produce(folder, 60s)).payload;
  });
  while (!fs::exists(folder / "log")) std::this_thread::sleep_for(1ms);
  Child waiting([&] {
    const ProductCache cache(settings_for(folder));
    return cache.get(demo_recipe, slow_produce(folder, 0ms)).payload == code ? "right" : "wrong";
  });
  std::this_thread::sleep_for(50ms);
  killed.kill();
  EXPECT_EQ(waiting.finish().output, "right");
  EXPECT_EQ(killed.finish().signal, SIGKILL);
  EXPECT_EQ(ProductCache(settings_for(folder)).get(demo_recipe, never).payload, code);
}

TEST(ProductCache, processes_killed_at_any_moment_leave_a_sound_cache) {
  const TemporaryFolder folder;
  for (int i = 0; i < 30; ++i) {
    Child child([&] {
      const ProductCache cache(settings_for(folder));
      for (int round = 0;; ++round) {
        Recipe other = demo_recipe;
        other.content = std::to_string(round % 5);
        cache.store().keep(other, {code + other.content, "source", "notes"});
        if (round == 0) std::ofstream(folder / "log", std::ios::app) << "kept" << std::endl;
      }
      return std::string();
    });
    // A busy machine may not run the child for a while: the first one is given the time to keep an entry.
    while (!fs::exists(folder / "log")) std::this_thread::sleep_for(1ms);
    std::this_thread::sleep_for(std::chrono::milliseconds(i));
    child.kill();
    child.finish();
    const ProductCache cache(settings_for(folder));
    for (const CacheEntry& entry : cache.store().entries()) EXPECT_TRUE(entry.intact) << entry.path;
  }
  EXPECT_GE(ProductCache(settings_for(folder)).store().entries().size(), 1u);
}

TEST(ProductCache, a_full_disk_costs_only_the_cache) {
  const TemporaryFolder folder;
  const auto result = run_in_child([&] {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit small{4000, 4000};
    ::setrlimit(RLIMIT_FSIZE, &small);
    const ProductCache cache(settings_for(folder));
    const Artifact artifact = cache.get(demo_recipe, [] { return Product{code, "source", "notes"}; });
    return artifact.payload == code && artifact.path.empty() ? "right" : "wrong";
  });
  EXPECT_EQ(result.output, "right");
  for (const auto& entry : fs::directory_iterator(folder / "cache")) EXPECT_EQ(entry.path().filename(), "lock");
}

TEST(ProductCache, a_folder_that_cannot_be_written_costs_only_the_cache) {
  const TemporaryFolder folder;
  fs::create_directory(folder / "cache");
  if (::geteuid() == 0) {  // root may write anywhere: be somebody else
    ASSERT_EQ(::chmod(folder.path().c_str(), 0755), 0);
    ASSERT_EQ(::chown((folder / "cache").c_str(), nobody, nobody), 0);
  }
  ASSERT_EQ(::chmod((folder / "cache").c_str(), 0500), 0);
  const auto result = run_in_child([&] {
    if (::geteuid() == 0 && ::setuid(nobody) != 0) return "cannot become nobody";
    const ProductCache cache(settings_for(folder));
    const Artifact artifact = cache.get(demo_recipe, [] { return Product{code, "source", "notes"}; });
    return artifact.payload == code && artifact.path.empty() ? "right" : "wrong";
  });
  EXPECT_EQ(result.output, "right");
}

TEST(ProductCache, a_folder_of_another_user_is_not_used) {
  const TemporaryFolder folder;
  support::Settings settings = settings_for(folder);
  { ProductCache(settings).get(demo_recipe, slow_produce(folder, 0ms)); }
  if (::geteuid() == 0) {
    ASSERT_EQ(::chown((folder / "cache").c_str(), nobody, nobody), 0);
  } else {
    settings.cache_dir = "/usr";
  }
  const ProductCache cache(settings);
  EXPECT_NE(cache.store().problem().find("belongs to user"), std::string::npos) << cache.store().problem();
  EXPECT_TRUE(cache.get(demo_recipe, slow_produce(folder, 0ms)).compiled);
}

TEST(ProductCache, kernels_made_ahead_of_time_need_no_compiler) {
  const TemporaryFolder folder;
  support::Settings maker = settings_for(folder);
  maker.cache_dir = maker.aot_dir;
  { ProductCache(maker).get(demo_recipe, slow_produce(folder, 0ms)); }
  support::Settings user = settings_for(folder);
  user.jit = false;
  Recipe without_compiler = demo_recipe;
  without_compiler.compiler.clear();
  for (const Recipe& wanted : {demo_recipe, without_compiler}) {
    const auto artifact = ProductCache(user).find_ahead_of_time(wanted);
    ASSERT_TRUE(artifact.has_value());
    EXPECT_EQ(artifact->payload, code);
    EXPECT_EQ(artifact->path.parent_path(), user.aot_dir);
    EXPECT_TRUE(artifact->ahead_of_time);
  }
}

TEST(ProductCache, kernels_lie_beside_the_library_and_its_package) {
  const fs::path packages = "/packages", package = packages / "flash_attention";
  EXPECT_EQ(kernels_beside(package / "library.so"),
            (std::vector{packages / "flash_attention_kernels", package / "flash_attention_kernels"}));
  EXPECT_EQ(kernels_beside({}), std::vector<fs::path>{});
}

TEST(ProductCache, without_compilation_a_missing_kernel_is_named) {
  const TemporaryFolder folder;
  support::Settings settings = settings_for(folder);
  settings.jit = false;
  try {
    ProductCache(settings).get(demo_recipe, never);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unavailable);
    for (const char* part : {"forward/demo sm_90a", "FLASH_ATTENTION_JIT is off", "flash-attention compile"}) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  }
}

TEST(ProductCache, a_failed_production_is_passed_on_and_tried_again) {
  const TemporaryFolder folder;
  const ProductCache cache(settings_for(folder));
  EXPECT_THROW(cache.get(demo_recipe, []() -> Product { throw Error(ErrorCode::compile_failed, "no"); }), Error);
  EXPECT_TRUE(cache.get(demo_recipe, slow_produce(folder, 0ms)).compiled);
}

TEST(ProductCache, a_long_compilation_says_so) {
  const TemporaryFolder folder;
  const auto result = run_in_child([&] {
    static std::promise<std::string> first;  // message
    static std::once_flag heard;
    set_log_callback(
        [](std::string_view message, void*) { std::call_once(heard, [&] { first.set_value(std::string(message)); }); },
        nullptr);
    std::string message = "nothing within a minute";
    ProductCache(settings_for(folder))
        .get(demo_recipe, [&] {  // goes on until the message is here, however busy the machine is
          auto coming = first.get_future();
          if (coming.wait_for(60s) == std::future_status::ready) message = coming.get();
          return Product{code, "source", "notes"};
        });
    set_log_callback(nullptr, nullptr);
    return message;
  });
  EXPECT_NE(result.output.find("compiling forward/demo sm_90a, "), std::string::npos) << result.output;
  EXPECT_NE(result.output.find(" s so far"), std::string::npos) << result.output;
}

}  // namespace
}  // namespace flash_attention::jit
