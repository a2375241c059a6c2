#include "jit/diagnose.h"

#include "flash_attention/error.h"
#include "jit/cached.h"
#include "jit/nvrtc/nvrtc.h"

namespace flash_attention::jit {
namespace {

Finding nvrtc_finding() {
  if (!support::settings().jit) {
    return {"NVRTC", false, "FLASH_ATTENTION_JIT is off: only kernels from the caches are used",
            "unset FLASH_ATTENTION_JIT"};
  }
  try {
    const Nvrtc& compiler = Nvrtc::instance();
    std::string detail =
        compiler.identity() + ", " + compiler.path().string() + " (" + compiler.origin() + "); compiles for";
    for (const int arch : compiler.archs()) detail += " sm_" + std::to_string(arch);
    return {"NVRTC", true, detail, ""};
  } catch (const Error& error) {
    return {"NVRTC", false, error.what(), "pip install nvidia-cuda-nvrtc, or set FLASH_ATTENTION_NVRTC"};
  }
}

std::string contents_of(const Store& store) {
  std::int64_t bytes = 0;
  std::size_t damaged = 0;
  const auto entries = store.entries();
  for (const CacheEntry& entry : entries) bytes += entry.bytes, damaged += !entry.intact;
  return store.folder().string() + ": " + std::to_string(entries.size()) + " kernels, " + std::to_string(bytes) + " bytes" +
         (damaged == 0 ? "" : ", " + std::to_string(damaged) + " damaged");
}

}  // namespace

std::vector<Finding> diagnose() {
  const ProductCache& cache = product_cache();
  std::vector<Finding> findings{nvrtc_finding()};
  const Store& store = cache.store();
  if (store.problem().empty()) {
    findings.push_back({"kernel cache", true, contents_of(store), ""});
  } else {
    findings.push_back(
        {"kernel cache", false, store.problem(),
         "kernels are compiled anew in each process; set FLASH_ATTENTION_CACHE_DIR to a folder of your own"});
  }
  for (const Store& ahead : cache.ahead_of_time()) {
    findings.push_back({"kernels made ahead of time", true,
                        ahead.problem().empty() ? contents_of(ahead) : "none: " + ahead.problem(), ""});
  }
  if (cache.ahead_of_time().empty()) findings.push_back({"kernels made ahead of time", true, "none", ""});
  return findings;
}

}  // namespace flash_attention::jit
