#include "emulator/host/temporary_folder.h"

#include <unistd.h>

#include <charconv>
#include <random>

#include "flash_attention/error.h"
#include "support/file_lock.h"
#include "support/files.h"

namespace flash_attention::emulator {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;
using support::FileLock;

constexpr std::string_view prefix = "emulator-";

/// A process and its forks hold the lock of their folder's number as long as they live.
std::optional<FileLock> lock_number(const fs::path& base, std::uint32_t number) {
  return FileLock::acquire(base / "lock", std::uint64_t{number} << 2, 0ms);  // four numbers share a byte of the file
}

/// A killed process could not remove its folder.
void remove_folders_of_the_dead(const fs::path& base) {
  std::error_code error;
  for (fs::directory_iterator it(base, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (!name.starts_with(prefix)) continue;
    std::uint32_t number = 0;
    std::from_chars(name.data() + prefix.size(), name.data() + name.size(), number);
    std::error_code ignored;
    if (const auto lock = lock_number(base, number)) fs::remove_all(it->path(), ignored);
  }
}

struct ProcessFolder {
  fs::path path;
  std::optional<FileLock> lock;
  pid_t owner = ::getpid();

  ProcessFolder(fs::path folder, std::optional<FileLock> held) : path(std::move(folder)), lock(std::move(held)) {}
  ProcessFolder(ProcessFolder&&) = delete;
  ProcessFolder& operator=(ProcessFolder&&) = delete;
  ~ProcessFolder() {
    std::error_code ignored;
    if (::getpid() == owner) fs::remove_all(path, ignored);
  }
};

ProcessFolder make_folder() {
  const auto fail = [](const std::string& problem) -> Error {
    return {ErrorCode::unavailable,
            "the emulator has no folder for temporary files: " + problem + "; set TMPDIR to one that can be written"};
  };
  const auto outcome = support::private_temporary_folder();
  if (const auto* problem = std::get_if<std::string>(&outcome)) throw fail(*problem);
  const auto& base = std::get<fs::path>(outcome);
  remove_folders_of_the_dead(base);
  std::random_device random;
  for (int attempt = 0; attempt < 100; ++attempt) {
    const auto number = static_cast<std::uint32_t>(random());
    auto lock = lock_number(base, number);
    if (!lock) continue;
    const fs::path folder = base / (std::string(prefix) + std::to_string(number));
    std::error_code error;
    if (fs::create_directory(folder, error)) return {folder, std::move(lock)};
    if (error) throw fail(folder.string() + ": " + error.message());
  }
  throw fail(base.string() + " takes no new folder");
}

}  // namespace

const fs::path& temporary_folder() {
  static const ProcessFolder process = make_folder();  // after an exception the next call tries again
  return process.path;
}

}  // namespace flash_attention::emulator
