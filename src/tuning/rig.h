#pragma once

#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"

namespace flash_attention::tuning {

/// A call to measure or test: normalised. For a backward pass it also has the forward pass before it.
struct Call {
  Problem problem;
  Pass pass = Pass::forward;
  Problem forward;
};

/// Why no inputs can be made for a problem; empty if they can. The contents of masks and programs are not in a problem.
std::string unmeasurable(const Problem& problem);

/// The contents of the tensors.
enum class Inputs : std::uint8_t {
  usual,    // normal numbers, all keys and rows in use
  hostile,  // late maxima, lengths below the capacity with NaN after them, rows that see nothing
};

/// A result of a pass, on the host.
struct Result {
  std::string tensor;
  std::vector<float> values;
  std::int64_t row = 1;  // values that belong together
};

/// Why results differ from the expected ones by more than rounding in the problem's types; empty if they do not.
std::string difference(const Problem& problem, const std::vector<Result>& got, const std::vector<Result>& expected);

/// The tensors of a call, in memory of the device.
class Rig {
 public:
  Rig(const Call& call, const DeviceInfo& device, const Backend& backend, Inputs inputs);
  ~Rig();
  Rig(const Rig&) = delete;
  Rig& operator=(const Rig&) = delete;

  /// Runs a kernel on them. Its plan is for the call's problem; before a backward pass, for the forward pass.
  void run(const Kernel& kernel, const Plan& plan);
  /// The same; returns how long it takes.
  double seconds(const Kernel& kernel, const Plan& plan);

  /// Copies out and lse from another rig with the same inputs, for a backward pass.
  void take_forward_results(const Rig& other);

  /// Fills the results of the pass with NaN, so that elements that are not written show.
  void clear_results();
  /// About `most` values of each tensor: all values, or those of some rows.
  std::vector<Result> results(std::int64_t most = std::int64_t{1} << 40) const;

 private:
  struct Tensors;
  void ensure_workspace(const Plan& plan);

  Call call_;
  DeviceInfo device_;
  const Backend& backend_;
  std::unique_ptr<Tensors> tensors_;
};

}  // namespace flash_attention::tuning
