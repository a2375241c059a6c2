#pragma once

#include "cuda/driver.h"

namespace flash_attention::cuda {

/// During its life, work for the stream goes to the right GPU. It uses the caller's context if there is one: the
/// stream's own, or the current one if it belongs to that GPU. Otherwise the GPU's primary context is made current, and
/// the caller's is restored afterwards.
class ContextScope {
 public:
  /// Throws Error(invalid_argument) if the stream belongs to another GPU.
  ContextScope(const Driver& cu, int device, Stream stream);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  void enter(Context context);

  const Driver& cu_;
  bool pushed_ = false;
};

/// During its life, this thread may load code and allocate although another thread captures a stream in global mode.
/// Otherwise the driver would break off that capture. This is the driver's own rule for work that does not belong to
/// the captured stream.
class CaptureUndisturbed {
 public:
  explicit CaptureUndisturbed(const Driver& cu);
  ~CaptureUndisturbed();
  CaptureUndisturbed(const CaptureUndisturbed&) = delete;
  CaptureUndisturbed& operator=(const CaptureUndisturbed&) = delete;

 private:
  const Driver& cu_;
  int mode_ = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED; later the mode that this thread had
};

/// Whether the caller made the stream. The default streams belong to the current context.
inline bool is_own_stream(Stream stream) { return reinterpret_cast<std::uintptr_t>(stream) > 2; }

/// The GPU of a stream that the caller made.
DeviceHandle device_of(const Driver& cu, Stream stream);

/// Whether the stream is being recorded into a graph.
bool is_capturing(const Driver& cu, Stream stream);

}  // namespace flash_attention::cuda
