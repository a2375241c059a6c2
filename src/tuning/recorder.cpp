#include "tuning/recorder.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_set>

#include "support/log.h"
#include "tuning/problem_json.h"

namespace flash_attention::tuning {
namespace {

/// A line for each problem.
std::string line_of(const Problem& problem, Pass pass) {
  support::Json json = support::Json::object();
  const std::string text = json.add("pass", to_string(pass)).add("problem", to_json(problem)).text();
  std::string line;
  for (std::size_t i = 0; i < text.size(); ++i) {  // quoted text has no line breaks
    if (text[i] != '\n') {
      line += text[i];
      continue;
    }
    while (i + 1 < text.size() && text[i + 1] == ' ') ++i;
    line += ' ';
  }
  return line + '\n';
}

/// Writes in one system call, so that lines of several processes do not mix.
bool append(const std::filesystem::path& file, const std::string& line) {
  const int fd = ::open(file.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (fd < 0) return false;
  const bool written = ::write(fd, line.data(), line.size()) == static_cast<ssize_t>(line.size());
  return ::close(fd) == 0 && written;
}

}  // namespace

void record(const std::filesystem::path& file, const Problem& problem, Pass pass) {
  if (pass != Pass::forward && pass != Pass::backward) return;
  static std::mutex& mutex = *new std::mutex;  // never destroyed, like the cache of plans
  static auto& lines = *new std::unordered_set<std::string>;
  static bool failed = false;
  std::string line = line_of(problem, pass);
  const std::lock_guard lock(mutex);
  if (failed || !lines.insert(line).second) return;
  if (append(file, line)) return;
  failed = true;
  support::log("flash_attention: FLASH_ATTENTION_RECORD: cannot write " + file.string() + ": " + std::strerror(errno));
}

}  // namespace flash_attention::tuning
