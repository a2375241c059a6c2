#pragma once

#include <sys/types.h>

#include <functional>
#include <string>

namespace flash_attention::testing {

/// What a child process said and how it ended.
struct ChildResult {
  std::string output;  // what its body returned, or "error: " and the exception's text
  int exit_code = -1;  // 0, or 1 after an exception
  int signal = 0;      // that ended it
};

/// Runs a body in a forked process, for what must not happen in the test's own: other settings, crashes, kills, another
/// user. The test must not have asked for settings(), NVRTC or the driver before.
class Child {
 public:
  explicit Child(const std::function<std::string()>& body);
  ~Child();
  Child(Child&& other) noexcept;
  Child& operator=(Child&&) = delete;

  void kill();  // kill -9
  ChildResult finish();

 private:
  pid_t pid_ = -1;
  int pipe_ = -1;
};

ChildResult run_in_child(const std::function<std::string()>& body);

}  // namespace flash_attention::testing
