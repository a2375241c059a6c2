#include "cli/verbs/process.h"

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <sstream>

extern char** environ;

namespace flash_attention::cli {

Finished run_program(const std::vector<std::string>& words) {
  std::array<int, 2> ends{};
  if (::pipe(ends.data()) != 0) return {127, "no pipe"};
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  ::posix_spawn_file_actions_adddup2(&actions, ends[1], STDERR_FILENO);
  ::posix_spawn_file_actions_addclose(&actions, ends[0]);
  ::posix_spawn_file_actions_addclose(&actions, ends[1]);
  std::vector<char*> texts;
  for (const std::string& word : words) texts.push_back(const_cast<char*>(word.c_str()));
  texts.push_back(nullptr);
  pid_t child = 0;
  const int started = ::posix_spawnp(&child, texts[0], &actions, nullptr, texts.data(), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  ::close(ends[1]);
  Finished finished;
  std::array<char, 4096> block;
  for (ssize_t size = 0; started == 0 && (size = ::read(ends[0], block.data(), block.size())) > 0;) {
    finished.output.append(block.data(), static_cast<std::size_t>(size));
  }
  ::close(ends[0]);
  int status = 0;
  if (started != 0 || ::waitpid(child, &status, 0) < 0) return {127, "it could not be started"};
  finished.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return finished;
}

std::string find_program(const std::string& name) {
  const char* path = std::getenv("PATH");
  std::istringstream folders(path == nullptr ? "" : path);
  for (std::string folder; std::getline(folders, folder, ':');) {
    const std::filesystem::path file = std::filesystem::path(folder.empty() ? "." : folder) / name;
    if (::access(file.c_str(), X_OK) == 0 && !std::filesystem::is_directory(file)) return file.string();
  }
  return {};
}

std::string own_path() {
  std::error_code ignored;
  return std::filesystem::read_symlink("/proc/self/exe", ignored).string();
}

}  // namespace flash_attention::cli
