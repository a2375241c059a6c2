#include "cli/stress_run.h"

#include <chrono>
#include <deque>
#include <future>

#include "emulator/seed.h"
#include "flash_attention/attention.h"
#include "flash_attention/runtime.h"
#include "fuzz/generator/problems.h"
#include "support/attempt.h"

namespace flash_attention::cli {
namespace {

constexpr int problems_of_configuration = 20;  // compiling it takes longer than to run them
constexpr std::size_t most_differences = 20;

/// The kernels a problem goes through.
std::vector<testing::Target> targets_of(const testing::Case& c, const StressOptions& options) {
  std::vector<testing::Target> targets;
  const auto add = [&](const std::string& kernel, Pass pass) {
    const testing::Target target{.device = options.device, .kernel = kernel, .pass = pass};
    if (testing::rejection(c, target).empty()) targets.push_back(target);
  };
  if (options.kernel.empty() && !options.every_kernel) {
    for (const Pass pass : {Pass::forward, Pass::backward}) add("", pass);
    return targets;
  }
  const DeviceKind kind = options.device.kind == DeviceKind::cpu ? DeviceKind::cpu : DeviceKind::cuda;
  for (const KernelSummary& kernel : kernels()) {
    const bool flash =
        (kernel.pass == Pass::forward || kernel.pass == Pass::backward) && !kernel.name.starts_with("ladder/");
    if (options.every_kernel ? flash && kernel.device == kind : kernel.name == options.kernel)
      add(kernel.name, kernel.pass);
  }
  return targets;
}

/// Which levels an array draws from: with every second seed those that the fastest kernels take, else they would see few
/// of the problems.
fuzz::Domain domain_of(const StressOptions& options, std::uint64_t seed) {
  if (!options.kernel.empty()) return fuzz::domain_of(options.kernel);
  if (options.device.kind == DeviceKind::cpu || seed % 2 == 0) return fuzz::domain_of("");
  return fuzz::domain_of(device_info(options.device).arch >= 90 ? "forward/sm90" : "forward/sm80");
}

/// The problems one after another, array after array.
class Source {
 public:
  explicit Source(const StressOptions& options) : options_(options), seed_(options.seed) { fill(); }

  bool next(fuzz::GeneratedProblem& problem) {
    if (options_.only >= 0) {
      if (given_ || options_.only >= static_cast<std::int64_t>(array_.size())) return false;
      given_ = true;
      problem = array_[static_cast<std::size_t>(options_.only)];
      return true;
    }
    if (at_ == array_.size()) ++seed_, fill();
    problem = array_[at_++];
    return true;
  }

 private:
  void fill() {
    array_ = fuzz::problems(domain_of(options_, seed_), problems_of_configuration, seed_, {.empty_packs = false});
    at_ = 0;
  }

  const StressOptions& options_;
  std::uint64_t seed_;
  std::vector<fuzz::GeneratedProblem> array_;
  std::size_t at_ = 0;
  bool given_ = false;
};

/// A problem whose fp64 results and kernels are under way.
struct Pending {
  fuzz::GeneratedProblem problem;
  std::vector<testing::Target> targets;
  std::future<testing::Expected> expected;
  std::vector<std::future<void>> warm;
};

Pending begin(fuzz::GeneratedProblem problem, const StressOptions& options) {
  Pending pending;
  pending.targets = targets_of(problem.c, options);
  for (const testing::Target& target : pending.targets) {
    if (options.device.kind != DeviceKind::cpu)
      pending.warm.push_back(
          prewarm_in_background(problem.c.problem, target.pass, {.device = target.device, .kernel = target.kernel}));
  }
  pending.expected = std::async(std::launch::async, [c = problem.c] { return testing::expect(c, true); });
  pending.problem = std::move(problem);
  return pending;
}

class Stress {
 public:
  explicit Stress(const StressOptions& options) : options_(options) {
    if (options.device.kind == DeviceKind::emulator) emulator::set_num_sms(3);  // blocks take one tile after another
  }

  void run(Pending& pending) {
    const testing::Expected expected = pending.expected.get();
    for (std::future<void>& warm : pending.warm) {
      try {
        warm.get();
      } catch (const Error&) {  // the call itself will say it again
      }
    }
    for (const testing::Target& target : pending.targets) {
      std::vector<std::string> lines;
      try {
        lines = call(pending.problem, target, expected);
      } catch (const Error& error) {
        lines = {error.what()};
        report_.device_lost = options_.device.kind == DeviceKind::cuda && error.code() == ErrorCode::device_failed;
      }
      if (!lines.empty()) {
        report_.differences.push_back({pending.problem.seed, pending.problem.number, target.pass, target.kernel,
                                       to_string(pending.problem.c.problem) + "; " + pending.problem.c.name,
                                       std::move(lines)});
      }
      if (report_.device_lost) return;
    }
    ++report_.problems;
    report_.last_seed = pending.problem.seed;
  }

  StressReport& report() { return report_; }

 private:
  /// What differs, from fp64 or between calls.
  std::vector<std::string> call(const fuzz::GeneratedProblem& problem, const testing::Target& target,
                                const testing::Expected& expected) {
    const testing::Case& c = problem.c;
    const bool repeatable = target.pass == Pass::forward || c.problem.deterministic;
    testing::Outcome first;
    for (int run = 0; run < options_.repeats; ++run) {
      emulator::set_seed(static_cast<std::uint64_t>(problem.number * 7 + run));
      testing::Outcome outcome = testing::attempt(c, target, expected);
      ++report_.calls;
      ++report_.calls_of_kernel[make_plan(c.problem, target.pass, device_info(target.device), target.kernel).kernel];
      std::vector<std::string> lines = testing::differences(c, target.pass, outcome, expected, testing::random_slack);
      if (run == 0)
        first = std::move(outcome);
      else if (const std::string changed = testing::first_changed(first.results, outcome.results);
               repeatable && !changed.empty())
        lines.push_back("call " + std::to_string(run + 1) + " has other bits than the first one: " + changed);
      if (!lines.empty()) return lines;
    }
    return {};
  }

  const StressOptions& options_;
  StressReport report_;
};

}  // namespace

StressReport stress(const StressOptions& options, const std::function<void(std::uint64_t, std::int64_t)>& begins,
                    const std::function<void(const StressReport&)>& progress, const std::function<bool()>& stop) {
  const auto start = std::chrono::steady_clock::now();
  Stress stress(options);
  StressReport& report = stress.report();
  Source source(options);
  std::deque<Pending> pending;
  fuzz::GeneratedProblem problem;
  bool more = true;
  const auto elapsed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  while (!stop() && !report.device_lost && report.differences.size() < most_differences &&
         (options.only >= 0 || elapsed() < options.seconds) &&
         (options.max_problems == 0 || report.problems < options.max_problems)) {
    while (more && pending.size() < static_cast<std::size_t>(options.threads)) {
      more = source.next(problem);
      if (more) pending.push_back(begin(std::move(problem), options));
    }
    if (pending.empty()) break;
    begins(pending.front().problem.seed, pending.front().problem.number);
    stress.run(pending.front());
    pending.pop_front();
    report.seconds = elapsed();
    progress(report);
  }
  return std::move(report);
}

}  // namespace flash_attention::cli
