// A stand-in for libcuda.so.1 with two GPUs that compute nothing. It records launches and keeps a stack of contexts.
#include "fakes/fake_cuda.h"

#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>

#include "cuda/driver.h"

namespace {

using namespace flash_attention;
using namespace flash_attention::cuda;
using testing::FakeCuda;

FakeCuda state;
std::vector<std::unique_ptr<std::string>> images;  // a library and its kernel are both a pointer to the image

/// Contexts of GPU n: 0x10 * (n + 1) is the primary one.
Context primary(int device) {
  return reinterpret_cast<Context>(std::uintptr_t{0x10} * static_cast<std::uintptr_t>(device + 1));
}
int device_of_context(void* context) { return static_cast<int>(reinterpret_cast<std::uintptr_t>(context) / 0x10) - 1; }
int device_of_stream(void* stream) { return static_cast<int>(reinterpret_cast<std::uintptr_t>(stream) / 0x1000) - 1; }

/// Notes the call; returns the failure that was asked for.
Status called(const char* name) {
  if (state.quiet) return 0;
  state.calls.emplace_back(name);
  const auto failure = state.failures.find(name);
  return failure == state.failures.end() ? 0 : failure->second;
}

/// The same for a call that is unsafe while a stream is captured.
Status called_unsafe(const char* name) {
  if (state.captured_globally_elsewhere && state.capture_mode != 2) state.broke_capture.emplace_back(name);
  return called(name);
}

Status Init(unsigned) { return called("cuInit"); }
Status DriverGetVersion(int* version) { return *version = state.version, 0; }
Status GetErrorName(Status status, const char** name) {
  return *name = status == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_FAKE", 0;
}
Status GetErrorString(Status, const char** text) { return *text = "as the test asked", 0; }
Status DeviceGetCount(int* count) { return *count = state.device_count, called("cuDeviceGetCount"); }
Status DeviceGet(DeviceHandle* handle, int index) { return *handle = index, index < state.device_count ? 0 : 101; }
Status DeviceGetName(char* name, int, DeviceHandle) { return std::strcpy(name, "Fake GPU"), 0; }
Status DeviceTotalMem(std::size_t* bytes, DeviceHandle) { return *bytes = std::size_t{80} << 30, 0; }
Status DeviceGetAttribute(int* value, DeviceAttribute which, DeviceHandle) {
  switch (which) {
    case DeviceAttribute::multiprocessor_count:
      *value = 132;
      break;
    case DeviceAttribute::l2_cache_size:
      *value = 50 << 20;
      break;
    case DeviceAttribute::compute_capability_major:
      *value = 9;
      break;
    case DeviceAttribute::compute_capability_minor:
      *value = 0;
      break;
    case DeviceAttribute::max_shared_memory_per_block_optin:
      *value = 227 << 10;
      break;
  }
  return 0;
}
Status DevicePrimaryCtxRetain(Context* context, DeviceHandle device) {
  return *context = primary(device), called_unsafe("cuDevicePrimaryCtxRetain");
}
Status CtxGetCurrent(Context* context) {
  return *context = state.contexts.empty() ? nullptr : static_cast<Context>(state.contexts.back()), 0;
}
Status CtxPushCurrent(Context context) { return state.contexts.push_back(context), called("cuCtxPushCurrent"); }
Status CtxPopCurrent(Context* context) {
  return *context = static_cast<Context>(state.contexts.back()), state.contexts.pop_back(), 0;
}
Status CtxGetDevice(DeviceHandle* device) { return *device = device_of_context(state.contexts.back()), 0; }
Status StreamGetCtx(Stream stream, Context* context) { return *context = primary(device_of_stream(stream)), 0; }
Status StreamGetDevice(Stream stream, DeviceHandle* device) { return *device = device_of_stream(stream), 0; }
Status ThreadExchangeStreamCaptureMode(int* mode) { return std::swap(*mode, state.capture_mode), 0; }
Status StreamIsCapturing(Stream, int* status) { return *status = state.capturing, 0; }
Status LibraryLoadData(Library* library, const void* image, int*, void**, unsigned, int*, void**, unsigned) {
  if (state.contexts.empty()) return 201;
  if (const Status status = called_unsafe("cuLibraryLoadData")) return status;
  if (!state.too_new.empty() && state.too_new == static_cast<const char*>(image)) return 222;  // UNSUPPORTED_PTX_VERSION
  images.push_back(std::make_unique<std::string>(static_cast<const char*>(image)));
  state.loaded.push_back(*images.back());
  *library = reinterpret_cast<Library>(images.back().get());
  return 0;
}
Status LibraryUnload(Library) { return called("cuLibraryUnload"); }
Status LibraryGetKernel(Function* function, Library library, const char* name) {
  *function = reinterpret_cast<Function>(library);
  return std::strcmp(name, "kernel") == 0 ? called("cuLibraryGetKernel") : 500;
}
Status KernelGetFunction(void** function, Function kernel) {
  *function = kernel;
  return state.contexts.empty() ? 201 : called_unsafe("cuKernelGetFunction");
}
Status KernelSetAttribute(FunctionAttribute which, int value, Function, DeviceHandle device) {
  state.attributes.push_back({static_cast<int>(which), value, device});
  return called("cuKernelSetAttribute");
}
Status LaunchKernelEx(const LaunchConfig* config, Function function, void** parameters, void**) {
  ++state.num_launches;
  if (state.quiet) return 0;
  if (const Status status = called("cuLaunchKernelEx")) return status;
  FakeCuda::Launch launch{{config->grid[0], config->grid[1], config->grid[2]},
                          config->block[0],
                          config->shared_bytes,
                          0,
                          false,
                          config->stream,
                          *reinterpret_cast<std::string*>(function),
                          0,
                          {}};
  for (unsigned n = 0; n < config->num_attributes; ++n) {
    const LaunchAttribute& attribute = config->attributes[n];
    if (attribute.id == LaunchAttribute::cluster_dimension) launch.cluster = attribute.value.cluster[0];
    if (attribute.id == LaunchAttribute::programmatic_stream_serialization) launch.early = attribute.value.allowed != 0;
  }
  const bool own_stream = reinterpret_cast<std::uintptr_t>(config->stream) > 2;
  if (!own_stream && state.contexts.empty()) return 201;
  launch.device = own_stream ? device_of_stream(config->stream) : device_of_context(state.contexts.back());
  std::memcpy(&launch.args, parameters[0], sizeof(launch.args));
  state.launches.push_back(launch);
  return 0;
}
Status TensorMapEncodeTiled(void* map, int type, std::uint32_t rank, void* address, const std::uint64_t* sizes,
                            const std::uint64_t* strides, const std::uint32_t* box, const std::uint32_t*, int, int swizzle,
                            int, int) {
  if (const Status status = called("cuTensorMapEncodeTiled")) return status;
  const unsigned long long words[16] = {static_cast<unsigned long long>(type),
                                        rank,
                                        reinterpret_cast<unsigned long long>(address),
                                        sizes[0],
                                        strides[0],
                                        box[0],
                                        box[1],
                                        static_cast<unsigned long long>(swizzle)};
  std::memcpy(map, words, sizeof(words));
  return 0;
}
Status MemAlloc(DevicePointer* address, std::size_t bytes) {
  if (const Status status = called_unsafe("cuMemAlloc")) return status;
  *address = reinterpret_cast<DevicePointer>(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
  return 0;
}
Status MemFree(DevicePointer address) { return std::free(reinterpret_cast<void*>(address)), called_unsafe("cuMemFree"); }
Status MemGetInfo(std::size_t* free, std::size_t* total) { return *free = 1000, *total = 2000, 0; }
Status MemcpyHtoDAsync(DevicePointer to, const void* from, std::size_t bytes, Stream) {
  return std::memcpy(reinterpret_cast<void*>(to), from, bytes), 0;
}
Status MemcpyDtoHAsync(void* to, DevicePointer from, std::size_t bytes, Stream) {
  return std::memcpy(to, reinterpret_cast<void*>(from), bytes), 0;
}
Status MemcpyDtoDAsync(DevicePointer to, DevicePointer from, std::size_t bytes, Stream) {
  return std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes), 0;
}
Status MemsetD8Async(DevicePointer to, unsigned char value, std::size_t bytes, Stream) {
  return std::memset(reinterpret_cast<void*>(to), value, bytes), 0;
}
Status StreamSynchronize(Stream) { return called("cuStreamSynchronize"); }
Status StreamCreate(Stream* stream, unsigned) {
  return *stream = reinterpret_cast<Stream>(testing::fake_stream_of(device_of_context(state.contexts.back()))), 0;
}
Status not_faked() { return 801; }

const std::map<std::string, void*>& functions() {
  const auto address = [](auto* function) { return reinterpret_cast<void*>(function); };
  static const std::map<std::string, void*> all = {
      {"cuInit", address(Init)},
      {"cuDriverGetVersion", address(DriverGetVersion)},
      {"cuGetErrorName", address(GetErrorName)},
      {"cuGetErrorString", address(GetErrorString)},
      {"cuDeviceGetCount", address(DeviceGetCount)},
      {"cuDeviceGet", address(DeviceGet)},
      {"cuDeviceGetName", address(DeviceGetName)},
      {"cuDeviceTotalMem", address(DeviceTotalMem)},
      {"cuDeviceGetAttribute", address(DeviceGetAttribute)},
      {"cuDevicePrimaryCtxRetain", address(DevicePrimaryCtxRetain)},
      {"cuCtxGetCurrent", address(CtxGetCurrent)},
      {"cuCtxPushCurrent", address(CtxPushCurrent)},
      {"cuCtxPopCurrent", address(CtxPopCurrent)},
      {"cuCtxGetDevice", address(CtxGetDevice)},
      {"cuStreamGetCtx", address(StreamGetCtx)},
      {"cuStreamIsCapturing", address(StreamIsCapturing)},
      {"cuThreadExchangeStreamCaptureMode", address(ThreadExchangeStreamCaptureMode)},
      {"cuStreamCreate", address(StreamCreate)},
      {"cuStreamSynchronize", address(StreamSynchronize)},
      {"cuLibraryLoadData", address(LibraryLoadData)},
      {"cuLibraryUnload", address(LibraryUnload)},
      {"cuLibraryGetKernel", address(LibraryGetKernel)},
      {"cuKernelGetFunction", address(KernelGetFunction)},
      {"cuKernelSetAttribute", address(KernelSetAttribute)},
      {"cuLaunchKernelEx", address(LaunchKernelEx)},
      {"cuTensorMapEncodeTiled", address(TensorMapEncodeTiled)},
      {"cuMemAlloc", address(MemAlloc)},
      {"cuMemFree", address(MemFree)},
      {"cuMemGetInfo", address(MemGetInfo)},
      {"cuMemcpyHtoDAsync", address(MemcpyHtoDAsync)},
      {"cuMemcpyDtoHAsync", address(MemcpyDtoHAsync)},
      {"cuMemcpyDtoDAsync", address(MemcpyDtoDAsync)},
      {"cuMemsetD8Async", address(MemsetD8Async)},
  };
  return all;
}

}  // namespace

extern "C" {
FakeCuda* fake_cuda_state() { return &state; }

Status cuGetProcAddress_v2(const char* name, void** address, int version, std::uint64_t, int* found) {
  const auto place = functions().find(name);
  *address = place == functions().end() ? reinterpret_cast<void*>(not_faked) : place->second;
  if (std::strcmp(name, "cuStreamGetDevice") == 0) {
    const bool has_it = state.stream_get_device && version >= 12080;
    *address = has_it ? reinterpret_cast<void*>(StreamGetDevice) : nullptr;
  }
  *found = *address == nullptr ? 1 : 0;
  return 0;
}
}
