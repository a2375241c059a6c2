#include "support/log.h"

#include <mutex>

#include "flash_attention/runtime.h"

namespace flash_attention {
namespace {

struct Receiver {
  std::mutex mutex;
  LogCallback callback = nullptr;
  void* context = nullptr;
};

/// Never destroyed: a background thread may log while the process ends.
Receiver& receiver() {
  static Receiver& process = *new Receiver;
  return process;
}

}  // namespace

void set_log_callback(LogCallback callback, void* context) {
  const std::lock_guard lock(receiver().mutex);
  receiver().callback = callback;
  receiver().context = context;
}

void support::log(std::string_view message) {
  LogCallback callback = nullptr;
  void* context = nullptr;
  {
    const std::lock_guard lock(receiver().mutex);
    callback = receiver().callback;
    context = receiver().context;
  }
  if (callback != nullptr) callback(message, context);
}

}  // namespace flash_attention
