#include "jit/background/long_wait.h"

#include "support/log.h"

namespace flash_attention::jit {

using namespace std::chrono_literals;

LongWait::LongWait(std::string what)
    : thread_([this, what = std::move(what)](const std::stop_token& stop) { watch(stop, what); }) {}

void LongWait::watch(const std::stop_token& stop, const std::string& what) {
  const auto start = std::chrono::steady_clock::now();
  for (auto pause = 2s; !wait(stop, pause); pause = 10s) {
    const auto passed = std::chrono::duration_cast<std::chrono::seconds>(std::chrono::steady_clock::now() - start);
    support::log("flash_attention: " + what + ", " + std::to_string(passed.count()) + " s so far");
  }
}

bool LongWait::wait(const std::stop_token& stop, std::chrono::seconds pause) {
  std::unique_lock lock(mutex_);
  condition_.wait_for(lock, stop, pause, [] { return false; });
  return stop.stop_requested();
}

}  // namespace flash_attention::jit
