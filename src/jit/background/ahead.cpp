#include "jit/background/ahead.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <thread>

#include "flash_attention/error.h"
#include "jit/compile.h"
#include "jit/nvrtc/nvrtc.h"
#include "support/settings.h"

namespace flash_attention::jit {
namespace {

/// The threads of this process that compile ahead.
struct Workers {
  std::mutex mutex;
  std::vector<std::thread> threads;
  std::atomic<bool> ending = false;

  void end() {
    ending = true;
    const std::lock_guard lock(mutex);
    for (std::thread& thread : threads) thread.join();
    threads.clear();
  }
};

/// Never destroyed. NVRTC is open when this is made, so the process waits for the threads before NVRTC is taken down.
Workers& workers() {
  static auto* const process = new Workers;
  static const int waits = std::atexit([] { process->end(); });
  static_cast<void>(waits);
  return *process;
}

struct Queue {
  std::vector<KernelKey> keys;
  std::atomic<std::size_t> next = 0;
};

void work(Queue& queue, const Workers& all) {
  for (std::size_t i = queue.next++; i < queue.keys.size() && !all.ending; i = queue.next++) {
    try {
      compiled(queue.keys[i], true);
    } catch (const Error&) {  // the call that needs the kernel will say it
    }
  }
}

}  // namespace

void compile_ahead(std::vector<KernelKey> keys) {
  std::erase_if(keys, [](const KernelKey& key) { return find_compiled(key) != nullptr; });
  if (keys.empty() || !support::settings().jit) return;
  Nvrtc::instance();
  Workers& all = workers();
  const std::size_t count = std::min<std::size_t>({keys.size(), 4, std::max(1u, std::thread::hardware_concurrency())});
  const auto queue = std::make_shared<Queue>(std::move(keys));
  const std::lock_guard lock(all.mutex);
  for (std::size_t i = 0; i < count && !all.ending; ++i) all.threads.emplace_back([queue, &all] { work(*queue, all); });
}

}  // namespace flash_attention::jit
