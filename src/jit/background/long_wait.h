#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace flash_attention::jit {

/// During its life, reports through the log callback that something takes long.
class LongWait {
 public:
  explicit LongWait(std::string what);

 private:
  void watch(const std::stop_token& stop, const std::string& what);
  bool wait(const std::stop_token& stop, std::chrono::seconds pause);

  std::mutex mutex_;
  std::condition_variable_any condition_;
  std::jthread thread_;  // the last member: it uses the others, so it must end first
};

}  // namespace flash_attention::jit
