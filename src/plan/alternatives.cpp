#include <algorithm>
#include <array>
#include <string>

#include "plan/kernel_table.h"
#include "plan/tuned.h"

namespace flash_attention::plan {
namespace {

constexpr std::array queries_of_a_tile{32, 64, 128, 192};
constexpr std::array keys_of_a_tile{32, 64, 96, 128};
constexpr std::array stage_counts{1, 2, 3, 4, 6};
constexpr std::array split_counts{1, 2, 3, 4, 6, 8, 12, 16};

/// Whether two plans do the same, however they were chosen.
bool same_work(const Plan& x, const Plan& y) {
  Plan a = x, b = y;
  a.candidates.clear(), b.candidates.clear();
  a.tuned.clear(), b.tuned.clear();
  return a == b;
}

class Alternatives {
 public:
  Alternatives(const Problem& problem, Pass pass, const DeviceInfo& device)
      : problem_(problem), pass_(pass), device_(device) {
    device_.tuned.reset();  // the default is the choice of the rules
    Plan usual = choose(problem, pass, device_);
    Choice choice{.kernel = usual.kernel};
    found_.push_back({std::move(choice), std::move(usual)});
  }

  /// Returns true if the choice gives a plan, even if another choice gave the same plan before.
  bool add(const Choice& choice) {
    std::optional<Plan> plan = plan_choice(problem_, pass_, device_, choice);
    if (!plan) return false;
    if (std::ranges::none_of(found_, [&](const Alternative& known) { return same_work(known.plan, *plan); }))
      found_.push_back({choice, *std::move(plan)});
    return true;
  }

  /// Adds the kernel's own tile with other stages and splits, and other tiles with their own number of stages. All
  /// combinations would take hours to compile.
  void add_all(const KernelEntry& entry) {
    const Choice own{.kernel = std::string(entry.name)};
    if (!add(own)) return;
    const auto with = [&](int Choice::*field, int value) {
      Choice choice = own;
      choice.*field = value;
      add(choice);
    };
    for (const int count : split_counts) {
      if (entry.takes.splits) with(&Choice::num_splits, count);
    }
    for (const int count : stage_counts) {
      if (entry.takes.stages) with(&Choice::num_stages, count);
    }
    for (const int block_q : queries_of_a_tile) {
      for (const int block_kv : keys_of_a_tile) {
        if (entry.takes.tile) add({.kernel = own.kernel, .block_q = block_q, .block_kv = block_kv});
      }
    }
  }

  std::vector<Alternative> take() { return std::move(found_); }

 private:
  const Problem& problem_;
  Pass pass_;
  DeviceInfo device_;
  std::vector<Alternative> found_;
};

}  // namespace

std::vector<Alternative> alternatives(const Problem& normalised, Pass pass, const DeviceInfo& device) {
  Alternatives all(normalised, pass, device);
  if (normalised.invariant) return all.take();
  const bool gpu = device_traits(device.device).gpu_kernels;
  for (const KernelEntry& entry : kernel_table()) {
    if (entry.pass == pass && entry.automatic && device_traits(entry.device).gpu_kernels == gpu && !is_last_resort(entry))
      all.add_all(entry);
  }
  return all.take();
}

}  // namespace flash_attention::plan
