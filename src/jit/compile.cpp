#include "jit/compile.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>

#include "flash_attention/error.h"
#include "jit/background/long_wait.h"
#include "jit/cached.h"
#include "jit/file_names.h"
#include "jit/nvrtc.h"
#include "support/files.h"

namespace flash_attention::jit {
namespace {

/// Everything NVRTC is given.
struct Job {
  std::string unit;
  std::vector<SourceFile> headers;
  std::vector<std::string> options;
  Recipe recipe;
};

/// The architecture option: the GPU's own, or the newest virtual one that both know.
std::string arch_option(const KernelKey& key, const Nvrtc* compiler) {
  if (compiler == nullptr || std::ranges::binary_search(compiler->archs(), key.arch)) {
    return "--gpu-architecture=" + arch_name(key.arch);
  }
  const auto& archs = compiler->archs();
  const auto newer = std::ranges::upper_bound(archs, key.arch);
  if (newer == archs.begin()) {
    throw Error(ErrorCode::unavailable, compiler->path().string() + " (" + compiler->identity() + ") compiles for sm_" +
                                            std::to_string(archs.front()) + " and later, not for sm_" +
                                            std::to_string(key.arch) +
                                            "; install an older one: pip install nvidia-cuda-nvrtc-cu12");
  }
  return "--gpu-architecture=compute_" + std::to_string(*std::prev(newer));
}

Job make_job(const KernelKey& key, const Nvrtc* compiler) {
  const support::Settings& settings = support::settings();
  Job job;
  const std::string file = file_of_unit(key.unit, settings.kernel_dir);
  job.unit = emit(key, file);
  job.headers = sources_of(file, settings.kernel_dir);
  job.options = {arch_option(key, compiler), "-std=c++20", "-default-device", "--ptxas-options=-v"};
  std::istringstream more(settings.nvrtc_options);
  for (std::string option; more >> option;) job.options.push_back(option);

  job.recipe.name = to_string(key);
  job.recipe.stem = file_stem(key);
  job.recipe.kind = job.options.front().find("=compute_") == std::string::npos ? "cubin" : "ptx";
  job.recipe.compiler = compiler == nullptr ? "" : compiler->identity();
  job.recipe.content = job.unit;
  for (const std::string& option : job.options) job.recipe.content += '\0' + option;
  for (const SourceFile& header : job.headers) job.recipe.content += '\0' + header.name + '\0' + header.text;
  return job;
}

/// Puts a source that does not compile where it can be read; returns the path, or a word that it could not.
std::string keep_failed_source(const Job& job) {
  const Store& store = product_cache().store();
  const auto path = store.folder() / failed_source_name(job.recipe.stem);
  if (!store.problem().empty() || support::write_file_atomically(path, job.unit)) return "(not kept)";
  return path.string();
}

Product run_nvrtc(const Job& job, const Nvrtc& compiler) {
  Nvrtc::Result result = compiler.compile(job.unit, job.recipe.stem + ".cu", job.headers, job.options);
  if (!result.ok) {
    throw Error(ErrorCode::compile_failed, "NVRTC (" + compiler.identity() + ") could not compile " + job.recipe.name +
                                               "\nsource: " + keep_failed_source(job) + "\n" + result.log);
  }
  return {std::move(result.binary), job.unit, std::move(result.log)};
}

std::shared_ptr<const CompiledKernel> to_kernel(Artifact artifact) {
  return std::make_shared<CompiledKernel>(CompiledKernel{std::move(artifact.payload), read_report(artifact.notes),
                                                         std::move(artifact.path), artifact.compiled});
}

/// NVRTC, or null where there is none: kernels that are in a cache need none.
const Nvrtc* compiler_if_any() {
  try {
    return support::settings().jit ? &Nvrtc::instance() : nullptr;
  } catch (const Error&) {
    return nullptr;
  }
}

/// Those made ahead of time come first: where they serve, NVRTC is not even opened.
std::optional<Artifact> find_ahead_of_time(const KernelKey& key) {
  const Store& store = product_cache().ahead_of_time();
  return store.problem().empty() ? store.find(make_job(key, nullptr).recipe) : std::nullopt;
}

std::shared_ptr<const CompiledKernel> look_up_or_compile(const KernelKey& key, bool quiet) {
  if (auto artifact = find_ahead_of_time(key)) return to_kernel(std::move(*artifact));
  const Nvrtc* compiler = compiler_if_any();
  const Job job = make_job(key, compiler);
  return to_kernel(product_cache().get(
      job.recipe, [&] { return run_nvrtc(job, Nvrtc::instance()); }, quiet));
}

// The kernels of this process. A key that is being compiled is there already, as a future others wait for.
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

/// Another thread compiles it. That one may be quiet; the caller of this one waits.
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

std::shared_ptr<const CompiledKernel> find_compiled(const KernelKey& key) {
  {
    const std::lock_guard lock(memory().mutex);
    const auto place = memory().kernels.find(key);
    if (place != memory().kernels.end()) {
      return place->second.wait_for(std::chrono::seconds(0)) == std::future_status::ready ? place->second.get() : nullptr;
    }
  }
  auto artifact = find_ahead_of_time(key);
  if (!artifact) artifact = product_cache().find(make_job(key, compiler_if_any()).recipe);
  return artifact ? to_kernel(std::move(*artifact)) : nullptr;
}

std::shared_future<void> prewarm(std::vector<KernelKey> keys) {
  const std::size_t workers = std::min<std::size_t>({keys.size(), 4, std::max(1u, std::thread::hardware_concurrency())});
  return std::async(std::launch::async,
                    [keys = std::move(keys), workers] {
                      std::atomic<std::size_t> next{0};
                      const auto work = [&] {
                        for (std::size_t i = next++; i < keys.size(); i = next++) compiled(keys[i]);
                      };
                      std::vector<std::future<void>> helpers;
                      for (std::size_t i = 1; i < workers; ++i) helpers.push_back(std::async(std::launch::async, work));
                      work();
                      for (std::future<void>& helper : helpers) helper.get();
                    })
      .share();
}

}  // namespace flash_attention::jit
