#include "support/child.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <exception>
#include <stdexcept>
#include <utility>

namespace flash_attention::testing {

Child::Child(const std::function<std::string()>& body) {
  int ends[2];
  if (::pipe(ends) != 0) throw std::runtime_error("no pipe");
  pid_ = ::fork();
  if (pid_ < 0) throw std::runtime_error("no fork");
  if (pid_ != 0) {
    ::close(ends[1]);
    pipe_ = ends[0];
    return;
  }
  ::close(ends[0]);
  std::string text;
  int exit_code = 0;
  try {
    text = body();
  } catch (const std::exception& error) {
    text.assign("error: ").append(error.what());
    exit_code = 1;
  }
  for (std::size_t at = 0; at < text.size();) {
    const ssize_t written = ::write(ends[1], text.data() + at, text.size() - at);
    if (written <= 0) break;
    at += static_cast<std::size_t>(written);
  }
  ::_exit(exit_code);
}

Child::Child(Child&& other) noexcept : pid_(std::exchange(other.pid_, -1)), pipe_(std::exchange(other.pipe_, -1)) {}

Child::~Child() {
  if (pid_ < 0) return;
  kill();
  finish();
}

void Child::kill() { ::kill(pid_, SIGKILL); }

ChildResult Child::finish() {
  ChildResult result;
  char buffer[4096];
  for (ssize_t got = 0; (got = ::read(pipe_, buffer, sizeof(buffer))) > 0;) {
    result.output.append(buffer, static_cast<std::size_t>(got));
  }
  ::close(std::exchange(pipe_, -1));
  int status = 0;
  ::waitpid(std::exchange(pid_, -1), &status, 0);
  if (WIFEXITED(status)) result.exit_code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) result.signal = WTERMSIG(status);
  return result;
}

ChildResult run_in_child(const std::function<std::string()>& body) { return Child(body).finish(); }

}  // namespace flash_attention::testing
