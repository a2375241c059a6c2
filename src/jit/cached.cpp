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

constexpr auto lock_patience = 120s;  // a holder that takes longer is stuck; compiling twice is better than waiting

/// The file with this code; empty if the loader does not tell.
std::filesystem::path this_library() {
  Dl_info found;
  if (::dladdr(reinterpret_cast<const void*>(&this_library), &found) == 0 || found.dli_fname == nullptr) return {};
  std::error_code error;
  auto library = std::filesystem::canonical(found.dli_fname, error);
  return error ? std::filesystem::path{} : library;
}

/// The stores that exist. If the settings name one, it is the only one, even if it does not exist.
std::vector<Store> ahead_of_time_stores(const support::Settings& settings) {
  std::vector<Store> stores;
  if (!settings.aot_dir.empty()) {
    stores.emplace_back(settings.aot_dir, Store::Access::read_only, 0);
    return stores;
  }
  const std::filesystem::path library = this_library();
  for (const std::filesystem::path& folder : kernels_beside(library)) {
    std::error_code error;
    if (std::filesystem::is_directory(folder, error))
      stores.emplace_back(folder, Store::Access::read_only, 0, support::trust_in(library));
  }
  return stores;
}

}  // namespace

std::vector<std::filesystem::path> kernels_beside(const std::filesystem::path& library) {
  if (library.empty()) return {};
  const std::filesystem::path name = "flash_attention_kernels", folder = library.parent_path();
  return {folder.parent_path() / name, folder / name};
}

ProductCache::ProductCache(const support::Settings& settings)
    : ahead_of_time_(ahead_of_time_stores(settings)),
      store_(settings.cache_dir, Store::Access::read_write, settings.cache_limit_bytes),
      may_produce_(settings.jit) {
  if (!store_.problem().empty()) {
    support::log("flash_attention: compiled kernels are not kept on disk: " + store_.problem());
  }
}

std::optional<Artifact> ProductCache::find_ahead_of_time(const Recipe& recipe) const {
  for (const Store& store : ahead_of_time_) {
    if (auto artifact = store.find(recipe)) return artifact;
  }
  return std::nullopt;
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
  return {std::move(product.payload), std::move(product.notes), std::move(path), true, false};
}

const ProductCache& product_cache() {
  static const ProductCache process(support::settings());
  return process;
}

}  // namespace flash_attention::jit
