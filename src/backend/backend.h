#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "backend/kernel.h"
#include "backend/plain_kernel.h"
#include "flash_attention/append.h"
#include "flash_attention/runtime.h"

namespace flash_attention {

/// Measures calls on a device: the time of the work itself, not of the launch.
class Clock {
 public:
  virtual ~Clock() = default;
  /// `queue_work` queues it on the stream.
  virtual double seconds(void* stream, const std::function<void()>& queue_work) = 0;
};

/// The functions of a kind of device. Each kind's room fills in one row, and src/api/backends.cpp has the table of
/// rows. Everything that depends on the kind is a field here, and no other code compares kinds.
struct Backend {
  DeviceKind kind;
  std::string_view name;
  DeviceTraits traits;
  std::size_t vector_bytes = 0;  // kernels move this many at a time: tensors begin at multiples of it. 0: one element

  DeviceInfo (*info)(const Device& device);        // throws Error if the device does not exist
  std::string (*describe)(const Device& device);   // "cuda:0"
  std::vector<DeviceInfo> (*devices)() = nullptr;  // all of them; null: they are not listed
  std::vector<Finding> (*diagnose)() = nullptr;    // findings for `doctor`; null: none
  int (*threads)() = nullptr;                      // at this moment; plans depend on it. Null: plans do not
  int (*num_sms)() = nullptr;  // if a device's number can change, for tests: plans depend on it. 0: the device's own

  /// Makes the plan of a problem executable. `stream` is the call's: while it is captured nothing can be compiled, so
  /// the call is refused.
  std::unique_ptr<Kernel> (*load)(const Problem& problem, const Plan& plan, const DeviceInfo& device, void* stream);
  /// The same for one launch with another parameter type, and for a kernel outside of all plans. Null: no GPU kernels.
  std::unique_ptr<LaunchedKernel> (*load_launch)(const Launch& launch, const DeviceInfo& device, void* stream) = nullptr;
  std::unique_ptr<PlainKernel> (*load_plain)(const std::string& unit, const std::string& entry,
                                             const DeviceInfo& device) = nullptr;
  /// Writes new rows to a cache. Null: the launch of plan::lay_out_append does.
  void (*append)(const AppendProblem& problem, const AppendBuffers& buffers) = nullptr;
  /// The gradients of append. Null: the launches of plan::lay_out_append_gradients compute them.
  void (*append_backward)(const AppendProblem& problem, const AppendBuffers& buffers,
                          const AppendGradients& gradients) = nullptr;

  std::string (*driver)() = nullptr;  // the driver's version, on which times depend. Null: there is no driver

  /// For the library's own measurements (src/tuning): memory, a copy from the host (which waits), and time. Null if the
  /// memory is the host's.
  std::shared_ptr<void> (*allocate)(const Device& device, std::size_t bytes) = nullptr;
  void (*upload)(const Device& device, void* to, const void* from, std::size_t bytes) = nullptr;
  std::unique_ptr<Clock> (*clock)(const DeviceInfo& device) = nullptr;

  /// Copies to the host, after all earlier work of the stream; waits. Null if the memory is the host's.
  void (*download)(const Device& device, void* to, const void* from, std::size_t bytes, void* stream) = nullptr;
  /// Whether the stream records into a graph. Null if there are no streams.
  bool (*is_captured)(void* stream) = nullptr;

  std::size_t alignment(std::size_t element) const { return vector_bytes != 0 ? vector_bytes : element; }
};

}  // namespace flash_attention
