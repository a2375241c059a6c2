#include "support/files.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <thread>

#include "support/child.h"
#include "support/file_lock.h"
#include "support/folder.h"

namespace flash_attention::support {
namespace {

using namespace std::chrono_literals;
using testing::run_in_child;
using testing::TemporaryFolder;

constexpr uid_t nobody = 65534;

std::size_t num_files(const std::filesystem::path& folder) {
  return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(folder), {}));
}

TEST(Files, written_then_read) {
  const TemporaryFolder folder;
  std::string bytes("a\0b\n", 4);
  EXPECT_EQ(write_file_atomically(folder / "file", bytes), std::nullopt);
  EXPECT_EQ(read_file(folder / "file"), bytes);
  EXPECT_EQ(write_file_atomically(folder / "file", ""), std::nullopt);
  EXPECT_EQ(read_file(folder / "file"), "");
  EXPECT_EQ(num_files(folder.path()), 1u);
}

TEST(Files, what_is_not_a_file_is_not_read) {
  const TemporaryFolder folder;
  EXPECT_EQ(read_file(folder / "absent"), std::nullopt);
  EXPECT_EQ(read_file(folder.path()), std::nullopt);
}

TEST(Files, a_full_disk_leaves_the_old_file_and_no_temporary) {
  const TemporaryFolder folder;
  ASSERT_EQ(write_file_atomically(folder / "file", "old"), std::nullopt);
  const auto result = run_in_child([&] {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit small{1000, 1000};  // no file may grow past this, as on a disk that is full
    ::setrlimit(RLIMIT_FSIZE, &small);
    return write_file_atomically(folder / "file", std::string(5000, 'x')).value_or("written");
  });
  EXPECT_NE(result.output.find("cannot write"), std::string::npos) << result.output;
  EXPECT_EQ(read_file(folder / "file"), "old");
  EXPECT_EQ(num_files(folder.path()), 1u);
}

TEST(Files, a_folder_is_made_for_this_user_alone) {
  const TemporaryFolder folder;
  const auto path = folder / "a" / "b" / "private";
  EXPECT_EQ(prepare_private_folder(path), std::nullopt);
  struct stat status {};
  ASSERT_EQ(::stat(path.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0700u);
  EXPECT_EQ(prepare_private_folder(path), std::nullopt) << "it is there already";
}

TEST(Files, a_folder_others_may_write_to_is_refused) {
  const TemporaryFolder folder;
  for (const mode_t mode : {0720u, 0702u}) {
    ASSERT_EQ(::chmod(folder.path().c_str(), mode), 0);
    const auto reason = prepare_private_folder(folder.path());
    ASSERT_TRUE(reason.has_value()) << std::oct << mode;
    EXPECT_NE(reason->find("chmod go-w"), std::string::npos) << *reason;
  }
  ASSERT_EQ(::chmod(folder.path().c_str(), 0755), 0);
  EXPECT_EQ(prepare_private_folder(folder.path()), std::nullopt) << "readers do no harm";
}

TEST(Files, a_folder_of_another_user_is_refused) {
  const TemporaryFolder folder;
  std::filesystem::path theirs = "/usr";
  if (::geteuid() == 0) {
    theirs = folder.path();
    ASSERT_EQ(::chown(theirs.c_str(), nobody, nobody), 0);
  }
  const auto reason = prepare_private_folder(theirs);
  ASSERT_TRUE(reason.has_value());
  EXPECT_NE(reason->find("belongs to user"), std::string::npos) << *reason;
}

TEST(Files, a_link_of_another_user_is_not_followed) {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder / "mine");
  std::filesystem::permissions(folder / "mine", std::filesystem::perms::owner_all);
  std::filesystem::create_directory_symlink(folder / "mine", folder / "link");
  EXPECT_EQ(prepare_private_folder(folder / "link"), std::nullopt) << "one's own link leads where one wants";
  if (::geteuid() != 0) GTEST_SKIP() << "only root can make a link of another user";
  ASSERT_EQ(::lchown((folder / "link").c_str(), nobody, nobody), 0);
  const auto reason = prepare_private_folder(folder / "link");
  ASSERT_TRUE(reason.has_value());
  EXPECT_NE(reason->find("is a link of user"), std::string::npos) << *reason;
}

TEST(Files, a_folder_below_one_that_every_user_can_write_to_is_refused_unless_that_is_sticky) {
  const TemporaryFolder folder;
  std::filesystem::create_directories(folder / "open/between/private");
  std::filesystem::permissions(folder / "open/between/private", std::filesystem::perms::owner_all);
  ASSERT_EQ(::chmod((folder / "open").c_str(), 0777), 0);
  const auto reason = prepare_private_folder(folder / "open/between/private");
  ASSERT_TRUE(reason.has_value());
  EXPECT_NE(reason->find("can be written by every user"), std::string::npos) << *reason;
  ASSERT_EQ(::chmod((folder / "open").c_str(), 01777), 0);
  EXPECT_EQ(prepare_private_folder(folder / "open/between/private"), std::nullopt);
}

TEST(Files, code_is_read_from_ones_own_files_alone) {
  const TemporaryFolder folder;
  testing::write_text(folder / "code", "bytes");
  ASSERT_EQ(::chmod((folder / "code").c_str(), 0644), 0);
  EXPECT_EQ(read_trusted_file(folder / "code").bytes, "bytes");
  EXPECT_EQ(read_trusted_file(folder / "absent").bytes, std::nullopt);
  EXPECT_EQ(read_trusted_file(folder / "absent").refused, "");
  std::filesystem::create_symlink(folder / "code", folder / "link");
  EXPECT_NE(read_trusted_file(folder / "link").refused.find("is a link"), std::string::npos);
  EXPECT_NE(read_trusted_file(folder.path()).refused.find("is not a file"), std::string::npos);
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  EXPECT_NE(read_trusted_file(folder / "pipe").refused.find("is not a file"), std::string::npos) << "and does not wait";
  ASSERT_EQ(::chmod((folder / "code").c_str(), 0646), 0);
  EXPECT_NE(read_trusted_file(folder / "code").refused.find("written by other users"), std::string::npos);
  EXPECT_EQ(read_trusted_file(folder / "code").bytes, std::nullopt);
}

/// The folder for temporary files with that TMPDIR, or the reason why there is none.
std::string temporary_folder_with(const std::filesystem::path& tmpdir) {
  return run_in_child([&] {
           ::setenv("TMPDIR", tmpdir.c_str(), 1);
           const auto outcome = private_temporary_folder();
           const auto* folder = std::get_if<std::filesystem::path>(&outcome);
           return folder != nullptr ? folder->string() : "none: " + std::get<std::string>(outcome);
         })
      .output;
}

TEST(Files, temporary_files_have_a_private_folder_whatever_tmpdir_is) {
  const TemporaryFolder folder;
  const std::string usual = "flash_attention-" + std::to_string(::geteuid());
  EXPECT_EQ(temporary_folder_with(folder.path()), (folder / usual).string());
  testing::write_text(folder / "file", "");
  for (const char* bad : {"absent", "file"}) {
    EXPECT_TRUE(temporary_folder_with(folder / bad).starts_with("/tmp/flash_attention-")) << bad;
  }
}

TEST(Files, a_temporary_folder_under_a_name_that_is_not_ours_gets_another_name) {
  const TemporaryFolder folder;
  const std::string usual = "flash_attention-" + std::to_string(::geteuid());
  std::filesystem::create_directory(folder / usual);
  ASSERT_EQ(::chmod((folder / usual).c_str(), 0777), 0);
  const std::filesystem::path found = temporary_folder_with(folder.path());
  EXPECT_EQ(found.parent_path(), folder.path());
  EXPECT_NE(found.filename(), usual);
  EXPECT_EQ(prepare_private_folder(found), std::nullopt);
}

TEST(Files, a_file_in_the_way_of_a_folder_is_named) {
  const TemporaryFolder folder;
  testing::write_text(folder / "file", "");
  EXPECT_NE(prepare_private_folder(folder / "file").value_or("").find("is not a folder"), std::string::npos);
  EXPECT_NE(prepare_private_folder(folder / "file" / "below").value_or("").find("cannot create"), std::string::npos);
}

TEST(FileLock, one_slot_excludes_and_others_do_not) {
  const TemporaryFolder folder;
  const auto held = FileLock::acquire(folder / "lock", 400, 0ms);
  ASSERT_TRUE(held.has_value());
  EXPECT_FALSE(FileLock::acquire(folder / "lock", 400, 20ms).has_value());
  EXPECT_TRUE(FileLock::acquire(folder / "lock", 404, 0ms).has_value());
  const auto other_process =
      run_in_child([&] { return FileLock::acquire(folder / "lock", 400, 20ms).has_value() ? "taken" : "refused"; });
  EXPECT_EQ(other_process.output, "refused");
}

TEST(FileLock, released_at_the_end_of_its_scope) {
  const TemporaryFolder folder;
  { const auto held = FileLock::acquire(folder / "lock", 8, 0ms); }
  EXPECT_TRUE(FileLock::acquire(folder / "lock", 8, 0ms).has_value());
}

TEST(FileLock, released_when_the_holder_is_killed) {
  const TemporaryFolder folder;
  testing::Child holder([&] {
    const auto held = FileLock::acquire(folder / "lock", 8, 1s);
    testing::write_text(folder / "ready", "");
    std::this_thread::sleep_for(60s);
    return std::string();
  });
  while (!std::filesystem::exists(folder / "ready")) std::this_thread::sleep_for(1ms);
  EXPECT_FALSE(FileLock::acquire(folder / "lock", 8, 0ms).has_value());
  holder.kill();
  EXPECT_TRUE(FileLock::acquire(folder / "lock", 8, 10s).has_value());
}

TEST(FileLock, no_folder_no_lock) {
  const TemporaryFolder folder;
  EXPECT_FALSE(FileLock::acquire(folder / "absent" / "lock", 8, 10s).has_value());
}

/// pip leaves files that a group may write to where the user's umask says so: they are as good as the library beside them.
TEST(Trust, what_lies_beside_a_library_may_have_its_writers) {
  const testing::TemporaryFolder folder;
  const auto file = folder / "kernel", library = folder / "library";
  testing::write_text(file, "code");
  testing::write_text(library, "code");
  ::chmod(library.c_str(), 0664);
  ::chmod(file.c_str(), 0664);
  EXPECT_FALSE(read_trusted_file(file).bytes.has_value());
  EXPECT_TRUE(read_trusted_file(file, trust_in(library)).bytes.has_value());
  ::chmod(file.c_str(), 0666);  // more writers than the library has
  EXPECT_FALSE(read_trusted_file(file, trust_in(library)).bytes.has_value());
  ::chmod(file.c_str(), 0664);
  ::chmod(library.c_str(), 0644);
  EXPECT_FALSE(read_trusted_file(file, trust_in(library)).bytes.has_value());
  EXPECT_FALSE(read_trusted_file(file, trust_in(folder / "nothing")).bytes.has_value());
}

TEST(Trust, what_lies_beside_a_library_may_have_its_owner_and_group_alone) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give files away";
  constexpr uid_t somebody = 12345, another = 12346;
  const testing::TemporaryFolder folder;
  const auto file = folder / "kernel", library = folder / "library";
  testing::write_text(file, "code");
  testing::write_text(library, "code");
  ASSERT_EQ(::chown(library.c_str(), somebody, somebody), 0);
  ASSERT_EQ(::chown(file.c_str(), somebody, somebody), 0);
  EXPECT_FALSE(read_trusted_file(file).bytes.has_value());
  EXPECT_TRUE(read_trusted_file(file, trust_in(library)).bytes.has_value());
  ASSERT_EQ(::chown(file.c_str(), another, somebody), 0);
  EXPECT_FALSE(read_trusted_file(file, trust_in(library)).bytes.has_value());
  ::chmod(library.c_str(), 0664);
  ::chmod(file.c_str(), 0664);
  ASSERT_EQ(::chown(file.c_str(), somebody, another), 0);  // the writers are another group
  EXPECT_FALSE(read_trusted_file(file, trust_in(library)).bytes.has_value());
}

}  // namespace
}  // namespace flash_attention::support
