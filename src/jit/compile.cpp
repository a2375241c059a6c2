#include "jit/compile.h"

#include <map>
#include <mutex>

#include "jit/background/long_wait.h"
#include "jit/background/queue.h"
#include "jit/nvrtc/nvrtc_compiler.h"

namespace flash_attention::jit {
namespace {

std::shared_ptr<const CompiledKernel> to_kernel(Artifact artifact) {
  return std::make_shared<CompiledKernel>(CompiledKernel{std::move(artifact.payload), read_report(artifact.notes),
                                                         std::move(artifact.path), artifact.compiled,
                                                         artifact.ahead_of_time});
}

std::shared_ptr<const CompiledKernel> look_up_or_compile(const KernelKey& key, bool quiet) {
  return to_kernel(build(nvrtc_compiler(), unit_of(key), quiet));
}

// The kernels of this process. A key that is being compiled is already in the map, as a future that others wait for.
using Pending = std::shared_future<std::shared_ptr<const CompiledKernel>>;
struct Memory {
  std::mutex mutex;
  std::map<KernelKey, Pending> kernels;
};
/// Never destroyed: a background thread may still compile while the process ends.
Memory& memory() {
  static Memory& process = *new Memory;
  return process;
}

/// Waits for another thread that compiles it. That thread may be quiet; this caller waits, so it logs.
std::shared_ptr<const CompiledKernel> wait_for(const Pending& pending, const KernelKey& key) {
  if (pending.wait_for(std::chrono::seconds(0)) == std::future_status::ready) return pending.get();
  const LongWait wait("compiling " + to_string(key));
  return pending.get();
}

}  // namespace

std::shared_ptr<const CompiledKernel> compiled(const KernelKey& key, bool quiet) {
  std::promise<std::shared_ptr<const CompiledKernel>> promise;
  Pending pending;
  {
    const std::lock_guard lock(memory().mutex);
    const auto [place, is_new] = memory().kernels.try_emplace(key);
    if (!is_new) {
      pending = place->second;
    } else {
      place->second = promise.get_future().share();
    }
  }
  if (pending.valid()) return quiet ? pending.get() : wait_for(pending, key);
  try {
    auto kernel = look_up_or_compile(key, quiet);
    promise.set_value(kernel);
    return kernel;
  } catch (...) {
    promise.set_exception(std::current_exception());
    const std::lock_guard lock(memory().mutex);
    memory().kernels.erase(key);  // the next call tries again
    throw;
  }
}

std::shared_ptr<const CompiledKernel> compiled_here(const KernelKey& key) {
  std::promise<std::shared_ptr<const CompiledKernel>> promise;
  auto kernel = to_kernel(build_here(nvrtc_compiler(), unit_of(key)));
  promise.set_value(kernel);
  const std::lock_guard lock(memory().mutex);
  memory().kernels.insert_or_assign(key, promise.get_future().share());
  return kernel;
}

std::shared_ptr<const CompiledKernel> find_compiled(const KernelKey& key) {
  {
    const std::lock_guard lock(memory().mutex);
    const auto place = memory().kernels.find(key);
    if (place != memory().kernels.end()) {
      return place->second.wait_for(std::chrono::seconds(0)) == std::future_status::ready ? place->second.get() : nullptr;
    }
  }
  auto artifact = find_built(nvrtc_compiler(), unit_of(key));
  return artifact ? to_kernel(std::move(*artifact)) : nullptr;
}

std::shared_future<void> prewarm(std::vector<KernelKey> keys) {
  return std::async(std::launch::async,
                    [keys = std::move(keys)]() mutable {
                      CompileQueue queue{std::move(keys)};
                      const auto work = [&] { queue.work([](const KernelKey& key) { compiled(key); }); };
                      std::vector<std::future<void>> helpers;
                      for (std::size_t i = 1; i < queue.num_workers(); ++i)
                        helpers.push_back(std::async(std::launch::async, work));
                      work();
                      for (std::future<void>& helper : helpers) helper.get();
                    })
      .share();
}

}  // namespace flash_attention::jit
