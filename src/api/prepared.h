#pragma once

#include <atomic>
#include <memory>
#include <mutex>

#include "api/masks/form.h"
#include "backend/kernel.h"
#include "flash_attention/attention.h"

namespace flash_attention::api {

/// The part of a call that does not change from one call to the next.
class Prepared {
 public:
  Prepared(const Problem& given, const Problem& normalised, Plan chosen, DeviceInfo where);

  const Problem problem;  // normalised
  const Plan plan;
  const DeviceInfo device;
  const int slopes;  // the program's tensor with ALiBi's slopes, or -1
  const MaskForm mask_form;

  /// The executable, loaded at first use, so that a question for a plan or a workspace size compiles nothing. `stream`
  /// is the call's: while it is captured into a graph nothing can be compiled, so the call is refused.
  const Kernel& kernel(void* stream) const;
  bool is_loaded() const { return ready_.load(std::memory_order_acquire) != nullptr; }

 private:
  mutable std::once_flag loaded_;
  mutable std::unique_ptr<Kernel> kernel_;
  mutable std::atomic<const Kernel*> ready_ = nullptr;  // kernel_, for calls after the first
};

/// Looks the call up in the cache of this process; plans it on a miss.
std::shared_ptr<const Prepared> prepare(const Problem& problem, Pass pass, const Options& options);

/// The same for a call with its workspace. The CPU's plan depends on the number of threads. If there are more threads
/// than when the workspace was sized, this returns a plan for fewer threads that fits in it.
std::shared_ptr<const Prepared> prepare_to_run(const Problem& problem, Pass pass, const Options& options);

}  // namespace flash_attention::api
