#include "jit/cached.h"

#include <dlfcn.h>

#include <chrono>
#include <optional>

#include "flash_attention/error.h"
#include "jit/background/long_wait.h"
#include "support/log.h"

namespace flash_attention::jit {
namespace {

using namespace std::chrono_literals;

constexpr auto lock_patience = 120s;  // a holder that takes longer is stuck: compiling twice is better than waiting

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
  const auto of_package = folder.parent_path() / name;  // a separate Python package, next to the one the library is in
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

Artifact ProductCache::get(const Recipe& recipe, const std::function<Product()>& produce, bool quiet) const {
  if (auto artifact = find(recipe)) return *artifact;
  if (!may_produce_) {
    throw Error(ErrorCode::unavailable, "kernel " + recipe.name + " is not in the cache (" + store_.folder().string() +
                                            ") and FLASH_ATTENTION_JIT is off; run once with FLASH_ATTENTION_JIT=on, or " +
                                            "compile it ahead of time: flash-attention compile");
  }
  std::optional<LongWait> wait;
  if (!quiet) wait.emplace("compiling " + recipe.name);
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
