#pragma once

#include "cuda/driver.h"

namespace flash_attention::cuda {

/// While it lives, work for the stream goes to the right GPU. The caller's context is used wherever there is one: the
/// stream's own, else the current one if it is of that GPU; only otherwise the GPU's primary context is made current, and
/// the caller's comes back afterwards.
class ContextScope {
 public:
  /// Throws Error(invalid_argument) where the stream belongs to another GPU.
  ContextScope(const Driver& cu, int device, Stream stream);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  void enter(Context context);

  const Driver& cu_;
  bool pushed_ = false;
};

/// While it lives, this thread may load code and allocate although another thread captures a stream in global mode; the
/// driver would otherwise break off that capture. The driver's own rule for such work on another stream's behalf.
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

/// True for a stream of the caller's own; false for the default streams, which belong to the current context.
inline bool is_own_stream(Stream stream) { return reinterpret_cast<std::uintptr_t>(stream) > 2; }

/// The GPU that a stream of the caller's own belongs to.
DeviceHandle device_of(const Driver& cu, Stream stream);

/// True while the stream records into a graph.
bool is_capturing(const Driver& cu, Stream stream);

}  // namespace flash_attention::cuda
