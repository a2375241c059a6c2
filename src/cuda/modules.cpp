#include "cuda/modules.h"

#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "cuda/status.h"
#include "flash_attention/error.h"
#include "jit/compile.h"
#include "support/log.h"

namespace flash_attention::cuda {
namespace {

/// A kernel of the process; the driver loads it into each context that uses it.
struct Module {
  Function function = nullptr;
  std::map<int, int> shared_bytes;  // the limit that each GPU has been given for a launch
};

/// How SMs divide their memory is an attribute of a kernel. A kernel that is launched with both divisions is loaded
/// twice.
using ModuleKey = std::pair<jit::KernelKey, bool>;
ModuleKey module_key(const jit::KernelKey& key, const Launch& launch) { return {key, launch.prefer_shared_carveout}; }

struct Registry {
  std::mutex mutex;
  std::map<ModuleKey, Module> modules;
};

/// Never destroyed: at the end of the process the driver may end before our statics do.
Registry& registry() {
  static Registry& process = *new Registry;
  return process;
}

/// The driver's refusal, or 0.
Status load(const Driver& cu, const std::string& image, const std::string& name, Function& function) {
  Library library = nullptr;
  if (const Status status = cu.LibraryLoadData(&library, image.data(), nullptr, nullptr, 0, nullptr, nullptr, 0)) {
    return status;
  }
  if (const Status status = cu.LibraryGetKernel(&function, library, name.c_str()); status != 0) {
    cu.LibraryUnload(library);
    fail(cu, status, "cuLibraryGetKernel");
  }
  return 0;
}

/// Replaces a kernel that was made ahead of time by a toolkit newer than the driver: compiles it with the NVRTC of this
/// machine.
std::shared_ptr<const jit::CompiledKernel> compiled_instead(const std::string& refusal, const jit::CompiledKernel& kernel,
                                                            const jit::KernelKey& key) {
  const std::string reason = refusal + ": " + kernel.path.string() + " is not for this driver";
  try {
    auto other = jit::compiled_here(key);
    support::log("flash_attention: " + reason + "; it was compiled here");
    return other;
  } catch (const Error& error) {
    throw Error(error.code(), reason + "; " + error.what());
  }
}

bool fits(const Module& module, const Launch& launch, int device) {
  const auto allowed = module.shared_bytes.find(device);
  return allowed != module.shared_bytes.end() && allowed->second >= launch.shared_bytes;
}

}  // namespace

Function find_function(const jit::KernelKey& key, const Launch& launch, int device) {
  const std::lock_guard lock(registry().mutex);
  const auto place = registry().modules.find(module_key(key, launch));
  return place != registry().modules.end() && fits(place->second, launch, device) ? place->second.function : nullptr;
}

Function load_function(const Driver& cu, const jit::KernelKey& key, const Launch& launch, int device) {
  auto kernel = jit::compiled(key);  // outside the lock: it may take seconds
  std::unique_lock lock(registry().mutex);
  Module& module = registry().modules[module_key(key, launch)];  // the reference stays valid while the lock is released
  while (module.function == nullptr) {
    const Status status = load(cu, kernel->image, key.plain ? key.entry : "kernel", module.function);
    if (status == 0) break;
    if (!kernel->ahead_of_time) fail(cu, status, "cuLibraryLoadData");
    lock.unlock();
    kernel = compiled_instead(describe(cu, status, "cuLibraryLoadData"), *kernel, key);
    lock.lock();
  }
  if (!fits(module, launch, device)) {
    check(cu,
          cu.KernelSetAttribute(FunctionAttribute::max_dynamic_shared_bytes, launch.shared_bytes, module.function, device),
          "cuKernelSetAttribute(max dynamic shared memory)");
    if (launch.cluster > 8) {
      check(cu, cu.KernelSetAttribute(FunctionAttribute::non_portable_cluster_size_allowed, 1, module.function, device),
            "cuKernelSetAttribute(cluster size)");
    }
    // If two neighbouring launches divide the memory of SMs differently, the SMs are idle for microseconds to change
    // it.
    if (launch.prefer_shared_carveout) {
      check(cu, cu.KernelSetAttribute(FunctionAttribute::preferred_shared_carveout, 100, module.function, device),
            "cuKernelSetAttribute(shared memory carve-out)");
    }
    module.shared_bytes[device] = launch.shared_bytes;
  }
  // Loads the code into this context now, since a lazy load at the first launch might happen during a stream capture.
  void* in_this_context = nullptr;
  check(cu, cu.KernelGetFunction(&in_this_context, module.function), "cuKernelGetFunction");
  return module.function;
}

}  // namespace flash_attention::cuda
