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

/// Measures calls on a device: the time of the work itself, not of handing it over.
class Clock {
 public:
  virtual ~Clock() = default;
  /// `queue_work` queues it on the stream.
  virtual double seconds(void* stream, const std::function<void()>& queue_work) = 0;
};

/// What the library asks of a kind of device. Each kind's room fills in one row, and src/api/backends.cpp has the table of
/// them: what depends on the kind is a field here, and no other code asks for the kind.
struct Backend {
  DeviceKind kind;
  std::string_view name;
  DeviceTraits traits;
  std::size_t vector_bytes = 0;  // what kernels move at a time: tensors begin at multiples of it. 0: of an element

  DeviceInfo (*info)(const Device& device);        // throws Error where the device does not exist
  std::string (*describe)(const Device& device);   // "cuda:0"
  std::vector<DeviceInfo> (*devices)() = nullptr;  // all of them; null: they are not listed
  std::vector<Finding> (*diagnose)() = nullptr;    // what `doctor` says; null: nothing
  int (*threads)() = nullptr;                      // at this moment; plans depend on them. Null: plans do not
  int (*num_sms)() = nullptr;  // if a device's number can change, for tests: as threads. 0: the device's own

  /// Makes the plan of a problem executable. `stream` is the call's: while it is captured nothing can be compiled, which is
  /// refused.
  std::unique_ptr<Kernel> (*load)(const Problem& problem, const Plan& plan, const DeviceInfo& device, void* stream);
  /// The same for one launch with a separate parameter, and for a kernel outside of all plans. Null: no GPU kernels.
  std::unique_ptr<LaunchedKernel> (*load_launch)(const Launch& launch, const DeviceInfo& device, void* stream) = nullptr;
  std::unique_ptr<PlainKernel> (*load_plain)(const std::string& unit, const std::string& entry,
                                             const DeviceInfo& device) = nullptr;
  /// New rows for a cache. Null: by the launch of plan::lay_out_append.
  void (*append)(const AppendProblem& problem, const AppendBuffers& buffers) = nullptr;
  /// Its gradients. Null: by the launches of plan::lay_out_append_gradients.
  void (*append_backward)(const AppendProblem& problem, const AppendBuffers& buffers,
                          const AppendGradients& gradients) = nullptr;

  std::string (*driver)() = nullptr;  // its version, on which times depend. Null: there is none

  /// For what the library measures itself (src/tuning): memory, a copy from the host, which waits, and time. Null where the
  /// memory is the host's.
  std::shared_ptr<void> (*allocate)(const Device& device, std::size_t bytes) = nullptr;
  void (*upload)(const Device& device, void* to, const void* from, std::size_t bytes) = nullptr;
  std::unique_ptr<Clock> (*clock)(const DeviceInfo& device) = nullptr;

  /// Copies to the host, after everything on the stream before; waits. Null where the memory is the host's.
  void (*download)(const Device& device, void* to, const void* from, std::size_t bytes, void* stream) = nullptr;
  /// Whether the stream records into a graph. Null if there are no streams.
  bool (*is_captured)(void* stream) = nullptr;

  std::size_t alignment(std::size_t element) const { return vector_bytes != 0 ? vector_bytes : element; }
};

}  // namespace flash_attention
