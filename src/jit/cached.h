#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "jit/product.h"
#include "jit/store.h"
#include "support/settings.h"

namespace flash_attention::jit {

/// Where kernels made ahead of time may be if FLASH_ATTENTION_AOT_DIR is not set: in flash_attention_kernels (a
/// separate package) next to the folder of the library, and next to the library itself.
std::vector<std::filesystem::path> kernels_beside(const std::filesystem::path& library);

/// Products on disk: kernels made ahead of time, which are only read, then this user's cache.
class ProductCache {
 public:
  explicit ProductCache(const support::Settings& settings);

  /// The product of the recipe: found, or made by `produce` and kept. The caller gets its product even if the disk
  /// fails. If several processes and threads ask at the same time, one produces and the others wait. Throws
  /// Error(unavailable) if it is not found and FLASH_ATTENTION_JIT is off, and everything that `produce` throws.
  /// `quiet`: no caller waits, so a long compilation is not logged. Does not search kernels made ahead of time.
  Artifact get(const Recipe& recipe, const std::function<Product()>& produce, bool quiet = false) const;

  /// Only searches, and also without kernels made ahead of time.
  std::optional<Artifact> find(const Recipe& recipe) const { return store_.find(recipe); }

  /// A kernel made ahead of time, by any compiler.
  std::optional<Artifact> find_ahead_of_time(const Recipe& recipe) const;

  const std::vector<Store>& ahead_of_time() const { return ahead_of_time_; }  ///< those that exist
  const Store& store() const { return store_; }

 private:
  std::vector<Store> ahead_of_time_;
  Store store_;
  bool may_produce_;
};

/// The cache of the process's settings.
const ProductCache& product_cache();

}  // namespace flash_attention::jit
