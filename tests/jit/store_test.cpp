#include "jit/store.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "support/folder.h"

namespace flash_attention::jit {
namespace {

namespace fs = std::filesystem;
using testing::read_text;
using testing::TemporaryFolder;
using testing::write_text;

constexpr std::int64_t large = 1 << 30;

Recipe recipe(const std::string& content, const std::string& compiler = "nvrtc 13.0") {
  return {"forward/demo sm_90a", "forward_demo-sm_90a", "cubin", content, compiler};
}

Product product(const std::string& payload) { return {payload, "// source of " + payload, "notes of " + payload}; }

/// The files with that ending.
std::vector<fs::path> files(const fs::path& folder, const std::string& ending) {
  std::vector<fs::path> found;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() == ending) found.push_back(entry.path());
  }
  return found;
}

TEST(Store, what_is_kept_is_found) {
  const TemporaryFolder folder;
  const Store store(folder / "cache", Store::Access::read_write, large);
  ASSERT_EQ(store.problem(), "");
  EXPECT_FALSE(store.find(recipe("a")).has_value());
  const fs::path path = store.keep(recipe("a"), product("code"));
  const auto found = store.find(recipe("a"));
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->payload, "code");
  EXPECT_EQ(found->notes, "notes of code");
  EXPECT_EQ(found->path, path);
  EXPECT_FALSE(found->compiled);
}

TEST(Store, the_source_lies_beside_and_is_readable) {
  const TemporaryFolder folder;
  const Store store(folder / "cache", Store::Access::read_write, large);
  fs::path path = store.keep(recipe("a"), product("code"));
  EXPECT_TRUE(read_text(path).starts_with("code"));
  EXPECT_EQ(read_text(path.replace_extension(".cu")), "// source of code");
}

TEST(Store, another_content_or_compiler_is_another_entry) {
  const TemporaryFolder folder;
  const Store store(folder / "cache", Store::Access::read_write, large);
  store.keep(recipe("a", "nvrtc 13.0"), product("code"));
  EXPECT_FALSE(store.find(recipe("b", "nvrtc 13.0")).has_value());
  EXPECT_FALSE(store.find(recipe("a", "nvrtc 13.1")).has_value());
  EXPECT_TRUE(store.find(recipe("a", "")).has_value()) << "where there is no compiler, any one's product will do";
}

TEST(Store, a_damaged_file_is_removed_and_made_anew) {
  const TemporaryFolder folder;
  const Store store(folder / "cache", Store::Access::read_write, large);
  const fs::path path = store.keep(recipe("a"), product("code"));
  const std::string bytes = read_text(path);
  std::string flipped = bytes;
  flipped[1] ^= 4;
  for (const std::string& damaged : {bytes.substr(0, bytes.size() / 2), std::string(), flipped, std::string(4096, '\0')}) {
    write_text(path, damaged);
    ASSERT_EQ(store.entries().size(), 1u);
    EXPECT_FALSE(store.entries().front().intact);
    EXPECT_FALSE(store.find(recipe("a")).has_value());
    EXPECT_FALSE(fs::exists(path));
    store.keep(recipe("a"), product("code"));
    EXPECT_EQ(store.find(recipe("a"))->payload, "code");
  }
}

TEST(Store, an_entry_under_the_name_of_another_is_not_taken) {
  const TemporaryFolder folder;
  const Store store(folder / "cache", Store::Access::read_write, large);
  const fs::path a = store.keep(recipe("a"), product("code a"));
  const fs::path b = store.keep(recipe("b"), product("code b"));
  fs::copy_file(a, b, fs::copy_options::overwrite_existing);
  EXPECT_FALSE(store.find(recipe("b")).has_value());
}

TEST(Store, a_file_others_may_write_or_a_link_is_not_loaded) {
  const TemporaryFolder folder;
  const Store store(folder / "cache", Store::Access::read_write, large);
  const fs::path path = store.keep(recipe("a"), product("code"));
  ASSERT_EQ(::chmod(path.c_str(), 0622), 0);
  EXPECT_FALSE(store.find(recipe("a")).has_value());
  ASSERT_EQ(::chmod(path.c_str(), 0600), 0);
  EXPECT_TRUE(store.find(recipe("a")).has_value());
  fs::rename(path, folder / "elsewhere");
  fs::create_symlink(folder / "elsewhere", path);
  EXPECT_FALSE(store.find(recipe("a")).has_value());
}

TEST(Store, the_least_recently_used_goes_first) {
  const TemporaryFolder folder;
  const auto step = [] { std::this_thread::sleep_for(std::chrono::milliseconds(15)); };
  const Store store(folder / "cache", Store::Access::read_write, 3500);
  const std::string kilobyte(1000, 'x');
  for (const char* name : {"a", "b", "c"}) {
    if (*name == 'c') store.find(recipe("a"));  // used after b
    step();
    store.keep(recipe(name), product(kilobyte.substr(0, 500)));
    step();
  }
  EXPECT_TRUE(store.find(recipe("a")).has_value());
  EXPECT_FALSE(store.find(recipe("b")).has_value());
  EXPECT_TRUE(store.find(recipe("c")).has_value());
  EXPECT_EQ(files(folder / "cache", ".cu").size(), 2u) << "the source goes with its product";
}

TEST(Store, temporaries_of_killed_processes_are_removed) {
  const TemporaryFolder folder;
  const Store store(folder / "cache", Store::Access::read_write, large);
  const std::string name = store.keep(recipe("b"), product("code")).filename().string();
  const fs::path old_one = folder / "cache" / (name + ".temporary-1-0");
  const fs::path new_one = folder / "cache" / (name + ".temporary-2-0");
  write_text(old_one, "part");
  write_text(new_one, "part");
  fs::last_write_time(old_one, fs::file_time_type::clock::now() - std::chrono::hours(1));
  store.keep(recipe("a"), product("code"));
  EXPECT_FALSE(fs::exists(old_one));
  EXPECT_TRUE(fs::exists(new_one)) << "another process may be writing it";
}

TEST(Store, entries_and_clear) {
  const TemporaryFolder folder;
  const Store store(folder / "cache", Store::Access::read_write, large);
  store.keep(recipe("a"), product("code"));
  store.keep(recipe("b"), product("more code"));
  write_text(folder / "cache" / "notes.txt", "not ours");
  const auto entries = store.entries();
  ASSERT_EQ(entries.size(), 2u);
  EXPECT_TRUE(std::ranges::all_of(entries, &CacheEntry::intact));
  EXPECT_EQ(entries[0].kernel, "forward/demo sm_90a");
  std::int64_t bytes = 0;
  for (const CacheEntry& entry : entries) bytes += entry.bytes;
  EXPECT_GE(store.clear(), bytes);
  EXPECT_TRUE(store.entries().empty());
  EXPECT_TRUE(fs::exists(folder / "cache" / "notes.txt"));
}

/// Names that a user's files could have: close to ours, and not ours.
const std::vector<std::string> foreign_names = {
    "libc.so",
    "notes.cu",
    "kernel.ptx",
    "module.cubin",
    "a-0123456789abcdef0123456789abcdef.so",
    "a-0123456789abcdef0123456789abcdef-0123456.so",
    "a-0123456789abcdef0123456789abcdeg-01234567.so",
    "a-0123456789abcdef0123456789abcdef-01234567.txt",
    "-0123456789abcdef0123456789abcdef-01234567.so",
    "experiment-failed.cu",
    "x-sm_hopper-failed.cu",
    "draft.temporary-notes",
    "draft.temporary-1-0",
};

TEST(Store, what_is_not_ours_stays) {
  const TemporaryFolder folder;
  const Store store(folder / "cache", Store::Access::read_write, 1000);
  for (const std::string& name : foreign_names) {
    write_text(folder / "cache" / name, std::string(2000, 'x'));  // more than the limit: not ours to count either
    fs::last_write_time(folder / "cache" / name, fs::file_time_type::clock::now() - std::chrono::hours(1));
  }
  const fs::path path = store.keep(recipe("a"), product("code"));
  EXPECT_TRUE(fs::exists(path)) << "foreign files do not use up the limit";
  EXPECT_EQ(store.entries().size(), 1u);
  write_text(folder / "cache" / "forward_demo-sm_90a-failed.cu", "mistake");
  store.keep(recipe("b"), product(std::string(900, 'x')));
  EXPECT_FALSE(fs::exists(path)) << "evicted";
  EXPECT_GT(store.clear(), 0);
  EXPECT_FALSE(fs::exists(folder / "cache" / "forward_demo-sm_90a-failed.cu"));
  for (const std::string& name : foreign_names) EXPECT_TRUE(fs::exists(folder / "cache" / name)) << name;
}

TEST(Store, a_link_under_one_of_our_names_is_not_followed) {
  const TemporaryFolder folder;
  const Store store(folder / "cache", Store::Access::read_write, large);
  const fs::path path = store.keep(recipe("a"), product("code"));
  fs::rename(path, folder / "elsewhere");
  fs::create_symlink(folder / "elsewhere", path);
  EXPECT_TRUE(store.entries().empty());
  store.clear();
  EXPECT_TRUE(fs::exists(folder / "elsewhere"));
}

TEST(Store, a_read_only_folder_serves_any_compiler_and_is_left_alone) {
  const TemporaryFolder folder;
  fs::path path;
  { path = Store(folder / "cache", Store::Access::read_write, large).keep(recipe("a", "nvrtc 13.0"), product("code")); }
  const Store store(folder / "cache", Store::Access::read_only, 0);
  EXPECT_EQ(store.find(recipe("a", "nvrtc 12.4"))->payload, "code");
  EXPECT_TRUE(store.keep(recipe("b"), product("code")).empty());
  EXPECT_EQ(store.clear(), 0);
  write_text(path, "damaged");
  EXPECT_FALSE(store.find(recipe("a")).has_value());
  EXPECT_TRUE(fs::exists(path));
}

TEST(Store, a_limit_of_zero_keeps_nothing) {
  const TemporaryFolder folder;
  const Store store(folder / "cache", Store::Access::read_write, 0);
  EXPECT_NE(store.problem(), "");
  EXPECT_TRUE(store.keep(recipe("a"), product("code")).empty());
  EXPECT_FALSE(fs::exists(folder / "cache"));
}

}  // namespace
}  // namespace flash_attention::jit
