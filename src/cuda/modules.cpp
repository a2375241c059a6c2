#include "cuda/modules.h"

#include <map>
#include <mutex>

#include "cuda/status.h"
#include "jit/compile.h"

namespace flash_attention::cuda {
namespace {

/// A kernel of the process; the driver loads it into each context that uses it.
struct Module {
  Function function = nullptr;
  std::map<int, int> shared_bytes;  // what each GPU has been told that a launch may use
};

struct Registry {
  std::mutex mutex;
  std::map<jit::KernelKey, Module> modules;
};

/// Never destroyed: at the end of the process the driver may be gone before our statics.
Registry& registry() {
  static Registry& process = *new Registry;
  return process;
}

Function load(const Driver& cu, const std::string& image, const std::string& name) {
  Library library = nullptr;
  check(cu, cu.LibraryLoadData(&library, image.data(), nullptr, nullptr, 0, nullptr, nullptr, 0), "cuLibraryLoadData");
  Function function = nullptr;
  if (const Status status = cu.LibraryGetKernel(&function, library, name.c_str()); status != 0) {
    cu.LibraryUnload(library);
    fail(cu, status, "cuLibraryGetKernel");
  }
  return function;
}

bool fits(const Module& module, const Launch& launch, int device) {
  const auto allowed = module.shared_bytes.find(device);
  return allowed != module.shared_bytes.end() && allowed->second >= launch.shared_bytes;
}

}  // namespace

Function find_function(const jit::KernelKey& key, const Launch& launch, int device) {
  const std::lock_guard lock(registry().mutex);
  const auto place = registry().modules.find(key);
  return place != registry().modules.end() && fits(place->second, launch, device) ? place->second.function : nullptr;
}

Function load_function(const Driver& cu, const jit::KernelKey& key, const Launch& launch, int device) {
  const auto compiled = jit::compiled(key);  // outside the lock: it may take seconds
  const std::lock_guard lock(registry().mutex);
  Module& module = registry().modules[key];
  if (module.function == nullptr) module.function = load(cu, compiled->image, key.plain ? key.entry : "kernel");
  if (!fits(module, launch, device)) {
    check(cu,
          cu.KernelSetAttribute(FunctionAttribute::max_dynamic_shared_bytes, launch.shared_bytes, module.function, device),
          "cuKernelSetAttribute(max dynamic shared memory)");
    if (launch.cluster > 8) {
      check(cu, cu.KernelSetAttribute(FunctionAttribute::non_portable_cluster_size_allowed, 1, module.function, device),
            "cuKernelSetAttribute(cluster size)");
    }
    // What the SMs divide otherwise they divide anew when the next launch wants it: microseconds in which they are idle.
    if (launch.much_shared) {
      check(cu, cu.KernelSetAttribute(FunctionAttribute::preferred_shared_carveout, 100, module.function, device),
            "cuKernelSetAttribute(shared memory carve-out)");
    }
    module.shared_bytes[device] = launch.shared_bytes;
  }
  // Loads the code into this context now, since a lazy load at the first launch could fall into a stream capture.
  void* in_this_context = nullptr;
  check(cu, cu.KernelGetFunction(&in_this_context, module.function), "cuKernelGetFunction");
  return module.function;
}

}  // namespace flash_attention::cuda
