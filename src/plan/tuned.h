#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "flash_attention/plan.h"

namespace flash_attention::plan {

/// Choices that are made for a kernel. 0: the kernel chooses.
struct Choice {
  std::string kernel;
  int block_q = 0;
  int block_kv = 0;
  int num_stages = 0;
  int num_splits = 0;

  friend bool operator==(const Choice&, const Choice&) = default;
};

/// "forward/sm90, 128 x 64, 3 stages, keys in 2 parts".
std::string to_string(const Choice& choice);

/// A choice that was measured to be faster than the planner's own; without a kernel: there is none.
struct TunedChoice {
  Choice choice;
  std::string instead_of;  // the planner's own, in words
  double gain = 1;         // the time of the planner's own over that of this one
  double noise = 0;        // of the same measurement: gain - 1 is larger

  friend bool operator==(const TunedChoice&, const TunedChoice&) = default;
};

/// The part of a normalised problem that decides how long it takes: no strides except those of biases, no scale, and
/// options with numbers only as on or off. Lengths of packed sequences change from call to call: they are rounded to a
/// range, an eighth of an octave wide.
Problem tuning_form(const Problem& normalised);

/// The result of a kernel's self-test on a device (docs/your_gpu.md).
struct Verdict {
  std::string kernel;
  Pass pass = Pass::forward;
  bool passed = false;
  std::string reason{};  // why it failed

  friend bool operator==(const Verdict&, const Verdict&) = default;
};

/// The measurements on one device, for the planner: a part of DeviceInfo, never changed once made.
class Tuned {
 public:
  struct Entry {
    Problem problem;  // its tuning form
    Pass pass = Pass::forward;
    TunedChoice tuned;
  };

  /// `device`: where the entries were measured. A later entry of the same problem replaces an earlier one.
  Tuned(const DeviceInfo& device, const std::vector<Entry>& entries, std::vector<Verdict> verdicts = {});

  /// Whether the entries are from a device with the same plans: the same cores, threads and instruction set.
  bool serves(const DeviceInfo& device) const;

  /// The choice for a normalised problem; null if there is none. Problems whose bits must not depend on it have none.
  const TunedChoice* find(const Problem& normalised, Pass pass) const;
  /// The verdict of a kernel's self-test; null if there was none.
  const Verdict* verdict(std::string_view kernel, Pass pass) const;

  std::vector<Entry> entries() const;  // in no order
  const std::vector<Verdict>& verdicts() const { return verdicts_; }
  std::size_t size() const { return choices_.size(); }

 private:
  struct Key {
    Problem problem;
    Pass pass;
    friend bool operator==(const Key&, const Key&) = default;
  };
  struct Hash {
    std::size_t operator()(const Key& key) const {
      return hash_value(key.problem) * 31 + static_cast<std::size_t>(key.pass);
    }
  };

  int arch_, num_sms_, threads_;
  CpuIsa isa_;
  std::unordered_map<Key, TunedChoice, Hash> choices_;
  std::vector<Verdict> verdicts_;
};

/// Ways to solve a problem on a device that might be faster than the planner's own: other kernels, tiles, stages and
/// splits, each of which gives a plan of its own. The planner's own is the first, with the name of its kernel alone.
struct Alternative {
  Choice choice;
  Plan plan;
};
std::vector<Alternative> alternatives(const Problem& normalised, Pass pass, const DeviceInfo& device);

}  // namespace flash_attention::plan
