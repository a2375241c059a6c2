#include "cuda/driver.h"

#include <dlfcn.h>

#include <atomic>
#include <mutex>

#include "cuda/status.h"
#include "flash_attention/error.h"
#include "support/settings.h"

namespace flash_attention::cuda {
namespace {

constexpr int oldest_version = 12000;  // tensor maps, libraries that belong to no context

[[noreturn]] void unavailable(const std::string& message) { throw Error(ErrorCode::unavailable, message); }

/// Finds entry points with cuGetProcAddress. It returns the version of each function that belongs to `oldest_version`,
/// even if the driver has changed the plain name since.
class Binder {
 public:
  Binder(void* library, const std::filesystem::path& path) : path_(path) {
    get_ = reinterpret_cast<GetProcAddress>(::dlsym(library, "cuGetProcAddress_v2"));
    if (get_ == nullptr)
      unavailable(path.string() + " is too old for this library; CUDA 12.0 (driver 525) or later is needed");
  }

  template <typename Function>
  bool try_bind(Function*& function, const char* name, int version = oldest_version) const {
    void* address = nullptr;
    int found = 0;
    if (get_(name, &address, version, 0, &found) != 0) address = nullptr;
    function = reinterpret_cast<Function*>(address);
    return function != nullptr;
  }

  template <typename Function>
  void bind(Function*& function, const char* name) const {
    if (!try_bind(function, name)) unavailable(path_.string() + " has no " + name + "; update the NVIDIA driver");
  }

 private:
  using GetProcAddress = Status (*)(const char*, void**, int, std::uint64_t, int*);
  GetProcAddress get_;
  const std::filesystem::path& path_;
};

void bind_all(Driver& cu, const Binder& binder) {
  binder.bind(cu.GetErrorName, "cuGetErrorName");
  binder.bind(cu.GetErrorString, "cuGetErrorString");
  binder.bind(cu.DeviceGetCount, "cuDeviceGetCount");
  binder.bind(cu.DeviceGet, "cuDeviceGet");
  binder.bind(cu.DeviceGetName, "cuDeviceGetName");
  binder.bind(cu.DeviceGetAttribute, "cuDeviceGetAttribute");
  binder.bind(cu.DeviceTotalMem, "cuDeviceTotalMem");
  binder.bind(cu.DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
  binder.bind(cu.CtxGetCurrent, "cuCtxGetCurrent");
  binder.bind(cu.CtxPushCurrent, "cuCtxPushCurrent");
  binder.bind(cu.CtxPopCurrent, "cuCtxPopCurrent");
  binder.bind(cu.CtxGetDevice, "cuCtxGetDevice");
  binder.bind(cu.LibraryLoadData, "cuLibraryLoadData");
  binder.bind(cu.LibraryUnload, "cuLibraryUnload");
  binder.bind(cu.LibraryGetKernel, "cuLibraryGetKernel");
  binder.bind(cu.KernelGetFunction, "cuKernelGetFunction");
  binder.bind(cu.KernelSetAttribute, "cuKernelSetAttribute");
  binder.bind(cu.LaunchKernelEx, "cuLaunchKernelEx");
  binder.bind(cu.TensorMapEncodeTiled, "cuTensorMapEncodeTiled");
  binder.bind(cu.StreamCreate, "cuStreamCreate");
  binder.bind(cu.StreamDestroy, "cuStreamDestroy");
  binder.bind(cu.StreamSynchronize, "cuStreamSynchronize");
  binder.bind(cu.StreamIsCapturing, "cuStreamIsCapturing");
  binder.bind(cu.StreamGetCtx, "cuStreamGetCtx");
  binder.try_bind(cu.StreamGetDevice, "cuStreamGetDevice", 12080);
  binder.bind(cu.ThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode");
  binder.bind(cu.StreamBeginCapture, "cuStreamBeginCapture");
  binder.bind(cu.StreamEndCapture, "cuStreamEndCapture");
  binder.bind(cu.GraphInstantiateWithFlags, "cuGraphInstantiateWithFlags");
  binder.bind(cu.GraphLaunch, "cuGraphLaunch");
  binder.bind(cu.GraphExecDestroy, "cuGraphExecDestroy");
  binder.bind(cu.GraphDestroy, "cuGraphDestroy");
  binder.bind(cu.MemAlloc, "cuMemAlloc");
  binder.bind(cu.MemFree, "cuMemFree");
  binder.bind(cu.MemGetInfo, "cuMemGetInfo");
  binder.bind(cu.MemcpyHtoDAsync, "cuMemcpyHtoDAsync");
  binder.bind(cu.MemcpyDtoHAsync, "cuMemcpyDtoHAsync");
  binder.bind(cu.MemcpyDtoDAsync, "cuMemcpyDtoDAsync");
  binder.bind(cu.MemsetD8Async, "cuMemsetD8Async");
  binder.bind(cu.EventCreate, "cuEventCreate");
  binder.bind(cu.EventDestroy, "cuEventDestroy");
  binder.bind(cu.EventRecord, "cuEventRecord");
  binder.bind(cu.EventSynchronize, "cuEventSynchronize");
  binder.bind(cu.EventElapsedTime, "cuEventElapsedTime");
}

}  // namespace

Driver open_driver(const std::filesystem::path& library_path) {
  void* library = ::dlopen(library_path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const std::string reason = ::dlerror();
    unavailable(
        "there is no NVIDIA driver here, so no GPU can be used: install the NVIDIA driver, or give a container its "
        "GPUs (docker run --gpus all); the CPU needs none (" +
        reason + ")");
  }
  Driver cu{};
  cu.path = library_path;
  const Binder binder(library, library_path);
  Status (*init)(unsigned) = nullptr;
  Status (*get_version)(int*) = nullptr;
  binder.bind(init, "cuInit");
  binder.bind(get_version, "cuDriverGetVersion");
  if (get_version(&cu.version) != 0 || cu.version < oldest_version) {
    unavailable("the NVIDIA driver is for CUDA " + std::to_string(cu.version / 1000) + "." +
                std::to_string(cu.version % 1000 / 10) + "; 12.0 (driver 525) or later is needed: update it");
  }
  bind_all(cu, binder);
  if (const Status status = init(0); status != 0) throw Error(ErrorCode::unavailable, describe(cu, status, "cuInit"));
  return cu;
}

const Driver& driver() {
  // A failure is not remembered, because a GPU may appear later (a container gets one, a module is loaded). A failed
  // attempt is quick: the loader's search for one name, or cuInit.
  static std::atomic<const Driver*> found = nullptr;
  if (const Driver* opened = found.load(std::memory_order_acquire)) return *opened;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (const Driver* opened = found.load(std::memory_order_relaxed)) return *opened;
  const auto& chosen = support::settings().driver;
  const auto* opened = new Driver(open_driver(chosen.empty() ? "libcuda.so.1" : chosen));  // never destroyed
  found.store(opened, std::memory_order_release);
  return *opened;
}

}  // namespace flash_attention::cuda
