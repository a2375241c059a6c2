#pragma once

#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"

namespace flash_attention::tuning {

/// A call to be measured or tested: normalised, and for a backward pass the forward pass that it belongs to, too.
struct Call {
  Problem problem;
  Pass pass = Pass::forward;
  Problem forward;
};

/// Why inputs for a problem cannot be made up; empty if they can. What masks and programs show is in no problem.
std::string unmeasurable(const Problem& problem);

/// What is in the tensors.
enum class Inputs : std::uint8_t {
  usual,    // normal numbers, all keys and rows in use
  hostile,  // maxima that come late, lengths below the capacity with NaN behind them, rows that see nothing
};

/// A tensor that a pass has written, on the host.
struct Result {
  std::string tensor;
  std::vector<float> values;
  std::int64_t row = 1;  // values that belong together
};

/// Why results are not the expected ones but for rounding in the types of the problem; empty if they are.
std::string difference(const Problem& problem, const std::vector<Result>& got, const std::vector<Result>& expected);

/// The tensors of a call, in memory of the device.
class Rig {
 public:
  Rig(const Call& call, const DeviceInfo& device, const Backend& backend, Inputs inputs);
  ~Rig();
  Rig(const Rig&) = delete;
  Rig& operator=(const Rig&) = delete;

  /// Runs a kernel on them. Its plan is for the call's problem, or, before a backward pass, for its forward pass.
  void run(const Kernel& kernel, const Plan& plan);
  /// The same, and how long it takes.
  double seconds(const Kernel& kernel, const Plan& plan);

  /// out and lse of another rig with the same inputs, for a backward pass.
  void take_forward_results(const Rig& other);

  /// Fills what the pass writes with NaN, so that what is not written shows.
  void clear_results();
  /// About `most` values of each tensor: all, or of some rows.
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
