#include "cli/stress/stress_run.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <future>

#include "cli/output/format.h"
#include "cli/stress/stress_source.h"
#include "emulator/host/seed.h"
#include "flash_attention/attention.h"
#include "flash_attention/runtime.h"

namespace flash_attention::cli {
namespace {

constexpr std::size_t max_differences = 20;

/// A problem whose fp64 results and kernels are under way.
struct Pending {
  fuzz::GeneratedProblem problem;
  std::vector<testing::Target> targets;
  std::future<testing::Expected> expected;
  std::vector<std::future<void>> warm;

  ProblemName name() const { return {problem.seed, problem.number, problem.variant}; }
};

Pending begin(fuzz::GeneratedProblem problem, const StressOptions& options) {
  Pending pending;
  pending.targets = targets_of(problem.c, options);
  for (const testing::Target& target : pending.targets) {
    if (device_traits(options.device).gpu_kernels)
      pending.warm.push_back(
          prewarm_in_background(problem.c.problem, target.pass, {.device = target.device, .kernel = target.kernel}));
  }
  problem.c.narrow_products =
      std::any_of(pending.targets.begin(), pending.targets.end(),
                  [&](const testing::Target& target) { return testing::rounds_products(problem.c, target); });
  const bool backward = std::any_of(pending.targets.begin(), pending.targets.end(),
                                    [](const testing::Target& target) { return testing::is_backward(target.pass); });
  pending.expected = std::async(std::launch::async, [c = problem.c, backward] { return testing::expect(c, backward); });
  pending.problem = std::move(problem);
  return pending;
}

class Stress {
 public:
  explicit Stress(const StressOptions& options) : options_(options) {
    if (device_traits(options.device).emulated) emulator::set_num_sms(3);  // blocks take one tile after another
  }

  void run(Pending& pending) {
    const testing::Expected expected = pending.expected.get();
    for (std::future<void>& warm : pending.warm) {
      try {
        warm.get();
      } catch (const Error&) {  // the call itself will say it again
      }
    }
    for (const std::string& kernel : kernels_of(pending.problem.c, pending.targets))
      report_.compiled.insert(format("%016zx", std::hash<std::string>{}(kernel)));
    for (const testing::Target& target : pending.targets) {
      std::vector<std::string> lines;
      try {
        lines = call(pending.problem, target, expected);
      } catch (const Error& error) {
        lines = {error.what()};
        report_.device_lost = !device_traits(options_.device).host_memory && error.code() == ErrorCode::device_failed;
      }
      if (!lines.empty()) {
        report_.differences.push_back({pending.name(), std::string(to_string(target.pass)),
                                       kernel_of(pending.problem, target),
                                       to_string(pending.problem.c.problem) + "; " + pending.problem.c.name,
                                       std::move(lines), command_of(pending.name(), options_)});
      }
      if (report_.device_lost) return;
    }
    ++report_.problems;
    report_.last_seed = std::max(report_.last_seed, pending.problem.seed);
  }

  StressReport& report() { return report_; }

 private:
  /// The target's, or the one that the planner chooses.
  static std::string kernel_of(const fuzz::GeneratedProblem& problem, const testing::Target& target) {
    try {
      return make_plan(problem.c.problem, target.pass, device_info(target.device), target.kernel).kernel;
    } catch (const Error&) {
      return "no kernel";
    }
  }

  /// What differs, from fp64 or between calls.
  std::vector<std::string> call(const fuzz::GeneratedProblem& problem, const testing::Target& target,
                                const testing::Expected& expected) {
    const testing::Case& c = problem.c;
    const bool repeatable = target.pass == Pass::forward || c.problem.deterministic;
    testing::Outcome first;
    for (int run = 0; run < options_.repeats; ++run) {
      emulator::set_seed(static_cast<std::uint64_t>(problem.number * 7 + run));
      testing::Target this_time = target;
      this_time.prepared = run % 2 == 1;  // the same bits, also where the masks were prepared
      testing::Outcome outcome = testing::attempt(c, this_time, expected);
      ++report_.calls;
      ++report_.calls_of_kernel[kernel_of(problem, target)];
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

std::string command_of(const ProblemName& problem, const StressOptions& options) {
  const int arch = options.device.emulated_arch;
  std::string text = "flash-attention stress --device ";
  text += arch == 0 ? to_string(options.device)
                    : std::string(to_string(options.device.kind)) + " --arch sm_" + std::to_string(arch);
  text += " --domain " + domain_of_seed(problem.seed, options);
  const std::string kernel = options.every_kernel ? "all" : options.kernel;
  if (!kernel.empty()) text += " --kernel " + kernel;
  text += format(" --seed %llu --problem %lld", static_cast<unsigned long long>(problem.seed),
                 static_cast<long long>(problem.number));
  if (problem.variant != 0) text += " --variant " + std::to_string(problem.variant);
  return options.repeats <= StressOptions{}.repeats ? text : text + " --repeats " + std::to_string(options.repeats);
}

StressReport stress(const StressOptions& options, const std::function<void(const ProblemName&)>& begins,
                    const std::function<void(const StressReport&)>& progress, const std::function<bool()>& stop) {
  const auto start = std::chrono::steady_clock::now();
  Stress stress(options);
  StressReport& report = stress.report();
  StressSource source(options);
  std::deque<Pending> pending;
  fuzz::GeneratedProblem problem;
  bool more = true;
  const auto elapsed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  while (!stop() && !report.device_lost && report.differences.size() < max_differences &&
         (options.only >= 0 || elapsed() < options.seconds) &&
         (options.max_problems == 0 || report.problems < options.max_problems)) {
    while (more && pending.size() < static_cast<std::size_t>(options.threads)) {
      more = source.next(problem);
      if (more) pending.push_back(begin(std::move(problem), options));
    }
    if (pending.empty()) break;
    begins(pending.front().name());
    stress.run(pending.front());
    pending.pop_front();
    report.seconds = elapsed();
    progress(report);
  }
  progress(report);  // before the work ahead, which is not wanted now, has come to its end
  return std::move(report);
}

}  // namespace flash_attention::cli
