#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "jit/product.h"
#include "jit/store.h"
#include "support/settings.h"

namespace flash_attention::jit {

/// Where kernels made ahead of time may be when FLASH_ATTENTION_AOT_DIR does not say: flash_attention_kernels next to the
/// folder that holds the library, a package of its own, and next to the library itself.
std::vector<std::filesystem::path> kernels_beside(const std::filesystem::path& library);

/// The products on disk: kernels made ahead of time, which are only read, then this user's cache.
class ProductCache {
 public:
  explicit ProductCache(const support::Settings& settings);

  /// The product of the recipe: found, or made by `produce` and kept. Whatever is wrong with the disk, the caller gets its
  /// product. Of the processes and threads that ask at the same time, one produces and the others wait for it.
  /// Throws Error(unavailable) where it is not found and FLASH_ATTENTION_JIT is off, and what `produce` throws.
  /// `quiet`: no caller waits, and the log hears of no long compilation. What was made ahead of time is not looked for.
  Artifact get(const Recipe& recipe, const std::function<Product()>& produce, bool quiet = false) const;

  /// Only looks; again not at what was made ahead of time.
  std::optional<Artifact> find(const Recipe& recipe) const { return store_.find(recipe); }

  /// What was made ahead of time, by whatever compiler.
  std::optional<Artifact> find_ahead_of_time(const Recipe& recipe) const;

  const std::vector<Store>& ahead_of_time() const { return ahead_of_time_; }  ///< those that are there
  const Store& store() const { return store_; }

 private:
  std::vector<Store> ahead_of_time_;
  Store store_;
  bool may_produce_;
};

/// The cache that the process's settings describe.
const ProductCache& product_cache();

}  // namespace flash_attention::jit
