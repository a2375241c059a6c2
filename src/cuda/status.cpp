#include "cuda/status.h"

#include "flash_attention/error.h"

namespace flash_attention::cuda {
namespace {

struct Advice {
  Status status;
  ErrorCode code;
  const char* next_step;
};

constexpr Advice advices[] = {
    {2, ErrorCode::out_of_memory, "free memory on the GPU or make the problem smaller"},
    {3, ErrorCode::unavailable, "CUDA does not survive fork(): start worker processes with spawn"},
    {4, ErrorCode::unavailable, "the process is ending"},
    {34, ErrorCode::unavailable, "this is the toolkit's stub; the real libcuda.so.1 comes with the NVIDIA driver"},
    {46, ErrorCode::unavailable, "another process has the GPU for itself; see nvidia-smi"},
    {100, ErrorCode::unavailable, "no GPU is visible: look at nvidia-smi and CUDA_VISIBLE_DEVICES"},
    {101, ErrorCode::unavailable, "there is no GPU of that number; see flash-attention doctor"},
    {200, ErrorCode::unavailable,
     "the driver does not know this NVRTC's code: update the driver or install an older NVRTC"},
    {209, ErrorCode::unavailable,
     "the driver does not know this NVRTC's code: update the driver or install an older NVRTC"},
    {218, ErrorCode::unavailable, "the driver cannot read this NVRTC's PTX: update the driver"},
    {222, ErrorCode::unavailable, "the driver cannot read this NVRTC's PTX: update the driver"},
    {700, ErrorCode::device_failed,
     "a buffer is smaller than the problem says, or it is a bug: run under compute-sanitizer"},
    {701, ErrorCode::device_failed, "the launch needs more registers or shared memory than the GPU has"},
    {716, ErrorCode::device_failed, "a pointer is not aligned as its type needs"},
    {719, ErrorCode::device_failed, "an earlier kernel of this context failed: run under compute-sanitizer"},
    {802, ErrorCode::unavailable, "the system is not ready: is the fabric manager running?"},
    {803, ErrorCode::unavailable, "the driver library and the kernel module differ: reboot, or reinstall the driver"},
    {900, ErrorCode::device_failed, "not allowed while a stream is captured: call prewarm before the capture"},
    {901, ErrorCode::device_failed, "the capture failed earlier"},
    {906, ErrorCode::device_failed, "the default stream cannot be used while another stream is captured: pass the stream"},
};

const Advice* advice_for(Status status) {
  for (const Advice& advice : advices) {
    if (advice.status == status) return &advice;
  }
  return nullptr;
}

}  // namespace

std::string describe(const Driver& cu, Status status, const std::string& what) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (cu.GetErrorName(status, &name) != 0 || name == nullptr) name = "unknown error";
  if (cu.GetErrorString(status, &text) != 0 || text == nullptr) text = "";
  std::string message = what + ": " + name + " (" + std::to_string(status) + ")";
  if (*text != '\0') message.append(": ").append(text);
  if (const Advice* advice = advice_for(status)) message.append("; ").append(advice->next_step);
  return message;
}

void fail(const Driver& cu, Status status, const std::string& what) {
  const Advice* advice = advice_for(status);
  throw Error(advice != nullptr ? advice->code : ErrorCode::device_failed, describe(cu, status, what));
}

}  // namespace flash_attention::cuda
