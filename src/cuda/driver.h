#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>

/// The few types and functions of the CUDA driver that this library uses. They are declared here, so that building it
/// needs no toolkit. Names and values follow the CUDA driver API reference.
namespace flash_attention::cuda {

using Status = int;  // CUresult; 0 is success
using DeviceHandle = int;
using DevicePointer = std::uint64_t;
using Context = struct ContextObject*;
using Stream = struct StreamObject*;
using Event = struct EventObject*;
using Library = struct LibraryObject*;
using Function = struct FunctionObject*;  // a CUkernel: it belongs to no context, so launches follow the stream's
using Graph = struct GraphObject*;
using GraphExec = struct GraphExecObject*;

/// CUlaunchAttribute: the ones that are used.
struct LaunchAttribute {
  static constexpr int cluster_dimension = 4;
  static constexpr int programmatic_stream_serialization = 6;
  int id = 0;
  int padding = 0;
  union {
    unsigned cluster[3];
    int allowed;
    char bytes[64];
  } value{};
};
static_assert(sizeof(LaunchAttribute) == 72);

/// CUlaunchConfig.
struct LaunchConfig {
  unsigned grid[3] = {1, 1, 1};
  unsigned block[3] = {1, 1, 1};
  unsigned shared_bytes = 0;
  Stream stream = nullptr;
  LaunchAttribute* attributes = nullptr;
  unsigned num_attributes = 0;
};
static_assert(sizeof(LaunchConfig) == 56);

/// CUdevice_attribute.
enum class DeviceAttribute : int {
  multiprocessor_count = 16,
  l2_cache_size = 38,
  compute_capability_major = 75,
  compute_capability_minor = 76,
  max_shared_memory_per_block_optin = 97,
};

/// CUfunction_attribute.
enum class FunctionAttribute : int {
  max_dynamic_shared_bytes = 8,
  preferred_shared_carveout = 9,  // percent
  non_portable_cluster_size_allowed = 14
};

/// The driver's entry points, each under its name without "cu".
struct Driver {
  int version = 0;  // 13000 for 13.0
  std::filesystem::path path;

  Status (*GetErrorName)(Status, const char**);
  Status (*GetErrorString)(Status, const char**);
  Status (*DeviceGetCount)(int*);
  Status (*DeviceGet)(DeviceHandle*, int index);
  Status (*DeviceGetName)(char*, int, DeviceHandle);
  Status (*DeviceGetAttribute)(int*, DeviceAttribute, DeviceHandle);
  Status (*DeviceTotalMem)(std::size_t*, DeviceHandle);
  Status (*DevicePrimaryCtxRetain)(Context*, DeviceHandle);
  Status (*CtxGetCurrent)(Context*);
  Status (*CtxPushCurrent)(Context);
  Status (*CtxPopCurrent)(Context*);
  Status (*CtxGetDevice)(DeviceHandle*);
  Status (*LibraryLoadData)(Library*, const void* image, int* jit_options, void** jit_values, unsigned num_jit_options,
                            int* options, void** values, unsigned num_options);
  Status (*LibraryUnload)(Library);
  Status (*LibraryGetKernel)(Function*, Library, const char* name);
  Status (*KernelGetFunction)(void** of_current_context, Function);
  Status (*KernelSetAttribute)(FunctionAttribute, int value, Function, DeviceHandle);
  Status (*LaunchKernelEx)(const LaunchConfig*, Function, void** parameters, void** extra);
  Status (*TensorMapEncodeTiled)(void* map, int type, std::uint32_t rank, void* address, const std::uint64_t* sizes,
                                 const std::uint64_t* strides, const std::uint32_t* box,
                                 const std::uint32_t* element_strides, int interleave, int swizzle, int l2_promotion,
                                 int out_of_bounds_fill);
  Status (*StreamCreate)(Stream*, unsigned flags);
  Status (*StreamDestroy)(Stream);
  Status (*StreamSynchronize)(Stream);
  Status (*StreamIsCapturing)(Stream, int* status);
  Status (*StreamGetCtx)(Stream, Context*);
  Status (*StreamGetDevice)(Stream, DeviceHandle*);  // null before driver 12.8
  Status (*ThreadExchangeStreamCaptureMode)(int* mode);
  Status (*StreamBeginCapture)(Stream, int mode);
  Status (*StreamEndCapture)(Stream, Graph*);
  Status (*GraphInstantiateWithFlags)(GraphExec*, Graph, unsigned long long flags);
  Status (*GraphLaunch)(GraphExec, Stream);
  Status (*GraphExecDestroy)(GraphExec);
  Status (*GraphDestroy)(Graph);
  Status (*MemAlloc)(DevicePointer*, std::size_t);
  Status (*MemFree)(DevicePointer);
  Status (*MemGetInfo)(std::size_t* free, std::size_t* total);
  Status (*MemcpyHtoDAsync)(DevicePointer, const void*, std::size_t, Stream);
  Status (*MemcpyDtoHAsync)(void*, DevicePointer, std::size_t, Stream);
  Status (*MemcpyDtoDAsync)(DevicePointer to, DevicePointer from, std::size_t, Stream);
  Status (*MemsetD8Async)(DevicePointer, unsigned char, std::size_t, Stream);
  Status (*EventCreate)(Event*, unsigned flags);
  Status (*EventDestroy)(Event);
  Status (*EventRecord)(Event, Stream);
  Status (*EventSynchronize)(Event);
  Status (*EventElapsedTime)(float* milliseconds, Event, Event);
};

/// The driver of this process, initialised. Throws Error(unavailable) with the reason and the next step. After an error
/// the next call tries again.
const Driver& driver();

/// Opens a driver from a file, for driver(). Throws the same error.
Driver open_driver(const std::filesystem::path& library);

}  // namespace flash_attention::cuda
