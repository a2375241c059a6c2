#include "jit/background/ahead.h"

#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <thread>

#include "flash_attention/error.h"
#include "jit/background/queue.h"
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

/// Never destroyed. NVRTC has been opened before this is made, so at the end the process waits for the threads before
/// NVRTC is closed.
Workers& workers() {
  static auto* const process = new Workers;
  static const int waits = std::atexit([] { process->end(); });
  static_cast<void>(waits);
  return *process;
}

void compile_unless_ending(const KernelKey& key, const Workers& all) {
  if (all.ending) return;
  try {
    compiled(key, true);
  } catch (const Error&) {  // the call that needs the kernel reports it
  }
}

}  // namespace

void compile_ahead(std::vector<KernelKey> keys) {
  std::erase_if(keys, [](const KernelKey& key) { return find_compiled(key) != nullptr; });
  if (keys.empty() || !support::settings().jit) return;
  Nvrtc::instance();
  Workers& all = workers();
  const auto queue = std::make_shared<CompileQueue>(std::move(keys));
  const auto work = [queue, &all] { queue->work([&](const KernelKey& key) { compile_unless_ending(key, all); }); };
  const std::lock_guard lock(all.mutex);
  for (std::size_t i = 0; i < queue->num_workers() && !all.ending; ++i) all.threads.emplace_back(work);
}

}  // namespace flash_attention::jit
