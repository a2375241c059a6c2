#include "jit/cached.h"

#include <dlfcn.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "flash_attention/error.h"
#include "support/log.h"

namespace flash_attention::jit {
namespace {

using namespace std::chrono_literals;

constexpr auto lock_patience = 120s;  // a holder that takes longer is stuck: compiling twice is better than waiting

/// Says through the log callback that something takes long, for as long as it lives.
class LongWait {
 public:
  explicit LongWait(std::string what)
      : thread_([this, what = std::move(what)](const std::stop_token& stop) { watch(stop, what); }) {}

 private:
  void watch(const std::stop_token& stop, const std::string& what) {
    const auto start = std::chrono::steady_clock::now();
    for (auto pause = 2s; !wait(stop, pause); pause = 10s) {
      const auto passed = std::chrono::duration_cast<std::chrono::seconds>(std::chrono::steady_clock::now() - start);
      support::log("flash_attention: " + what + ", " + std::to_string(passed.count()) + " s so far");
    }
  }

  bool wait(const std::stop_token& stop, std::chrono::seconds pause) {
    std::unique_lock lock(mutex_);
    condition_.wait_for(lock, stop, pause, [] { return false; });
    return stop.stop_requested();
  }

  std::mutex mutex_;
  std::condition_variable_any condition_;
  std::jthread thread_;  // the last member: it uses the others, and ends first
};

/// The file that this code is in; empty where the loader does not say.
std::filesystem::path this_library() {
  Dl_info found;
  if (::dladdr(reinterpret_cast<const void*>(&this_library), &found) == 0 || found.dli_fname == nullptr) return {};
  std::error_code error;
  auto library = std::filesystem::canonical(found.dli_fname, error);
  return error ? std::filesystem::path{} : library;
}

Store ahead_of_time_store(const support::Settings& settings) {
  if (!settings.aot_dir.empty()) return Store(settings.aot_dir, Store::Access::read_only, 0);
  const std::filesystem::path library = this_library();
  return Store(kernels_beside(library), Store::Access::read_only, 0, support::trust_in(library));
}

}  // namespace

std::filesystem::path kernels_beside(const std::filesystem::path& library) {
  if (library.empty()) return {};
  const std::filesystem::path name = "flash_attention_kernels", folder = library.parent_path();
  std::error_code error;
  const auto of_package = folder.parent_path() / name;  // a Python package of its own, beside the one the library is in
  return !std::filesystem::is_directory(folder / name, error) && std::filesystem::is_directory(of_package, error)
             ? of_package
             : folder / name;
}

ProductCache::ProductCache(const support::Settings& settings)
    : ahead_of_time_(ahead_of_time_store(settings)),
      store_(settings.cache_dir, Store::Access::read_write, settings.cache_limit_bytes),
      may_produce_(settings.jit) {
  if (!store_.problem().empty()) {
    support::log("flash_attention: compiled kernels are not kept on disk: " + store_.problem());
  }
}

std::optional<Artifact> ProductCache::find(const Recipe& recipe) const {
  if (auto artifact = ahead_of_time_.find(recipe)) return artifact;
  return store_.find(recipe);
}

Artifact ProductCache::get(const Recipe& recipe, const std::function<Product()>& produce) const {
  if (auto artifact = find(recipe)) return *artifact;
  if (!may_produce_) {
    throw Error(ErrorCode::unavailable, "kernel " + recipe.name + " is not in the cache (" + store_.folder().string() +
                                            ") and FLASH_ATTENTION_JIT is off; run once with FLASH_ATTENTION_JIT=on, or " +
                                            "compile it ahead of time: flash-attention compile");
  }
  const LongWait wait("compiling " + recipe.name);
  const auto lock = store_.lock(recipe, lock_patience);
  if (auto artifact = find(recipe)) return *artifact;  // another process made it while this one waited
  Product product = produce();
  auto path = store_.keep(recipe, product);
  return {std::move(product.payload), std::move(product.notes), std::move(path), true};
}

const ProductCache& product_cache() {
  static const ProductCache process(support::settings());
  return process;
}

}  // namespace flash_attention::jit
