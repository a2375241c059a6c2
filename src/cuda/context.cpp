#include "cuda/context.h"

#include <array>
#include <atomic>
#include <mutex>

#include "cuda/status.h"
#include "flash_attention/error.h"

namespace flash_attention::cuda {
namespace {

constexpr int max_devices = 64;

/// The primary context, which frameworks share. Retained once and kept for the life of the process.
Context primary_context(const Driver& cu, int device) {
  static std::array<std::atomic<Context>, max_devices> retained{};
  static std::mutex mutex;
  if (device < 0 || device >= max_devices) {
    throw Error(ErrorCode::invalid_argument, "device: cuda:" + std::to_string(device) + " does not exist");
  }
  if (const Context context = retained[device].load(std::memory_order_acquire)) return context;
  const std::lock_guard lock(mutex);
  if (const Context context = retained[device].load(std::memory_order_relaxed)) return context;
  const CaptureUndisturbed undisturbed(cu);
  Context context = nullptr;
  check(cu, cu.DevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
  retained[device].store(context, std::memory_order_release);
  return context;
}

}  // namespace

DeviceHandle device_of(const Driver& cu, Stream stream) {
  DeviceHandle device = -1;
  if (cu.StreamGetDevice != nullptr) {
    check(cu, cu.StreamGetDevice(stream, &device), "cuStreamGetDevice");
    return device;
  }
  Context context = nullptr;
  check(cu, cu.StreamGetCtx(stream, &context), "cuStreamGetCtx");
  check(cu, cu.CtxPushCurrent(context), "cuCtxPushCurrent");
  const Status status = cu.CtxGetDevice(&device);
  cu.CtxPopCurrent(&context);
  check(cu, status, "cuCtxGetDevice");
  return device;
}

bool is_capturing(const Driver& cu, Stream stream) {
  int status = 0;
  // The legacy default stream cannot be captured itself. To query it fails while another stream is captured.
  if (stream == nullptr || reinterpret_cast<std::uintptr_t>(stream) == 1) return false;
  check(cu, cu.StreamIsCapturing(stream, &status), "cuStreamIsCapturing");
  return status != 0;
}

CaptureUndisturbed::CaptureUndisturbed(const Driver& cu) : cu_(cu) {
  check(cu, cu.ThreadExchangeStreamCaptureMode(&mode_), "cuThreadExchangeStreamCaptureMode");
}

CaptureUndisturbed::~CaptureUndisturbed() { cu_.ThreadExchangeStreamCaptureMode(&mode_); }

void ContextScope::enter(Context context) {
  check(cu_, cu_.CtxPushCurrent(context), "cuCtxPushCurrent");
  pushed_ = true;
}

ContextScope::ContextScope(const Driver& cu, int device, Stream stream) : cu_(cu) {
  if (is_own_stream(stream) && !is_capturing(cu, stream)) {  // a stream that is captured must not be queried
    const DeviceHandle owner = device_of(cu, stream);
    if (owner != device) {
      throw Error(ErrorCode::invalid_argument, "stream: it belongs to cuda:" + std::to_string(owner) +
                                                   ", the call is for cuda:" + std::to_string(device) +
                                                   "; pass a stream of that GPU");
    }
  }
  Context current = nullptr;
  check(cu, cu.CtxGetCurrent(&current), "cuCtxGetCurrent");
  if (current != nullptr) {
    DeviceHandle current_device = -1;
    check(cu, cu.CtxGetDevice(&current_device), "cuCtxGetDevice");
    if (current_device == device) return;
  }
  enter(primary_context(cu, device));
}

ContextScope::~ContextScope() {
  Context ignored = nullptr;
  if (pushed_) cu_.CtxPopCurrent(&ignored);
}

}  // namespace flash_attention::cuda
