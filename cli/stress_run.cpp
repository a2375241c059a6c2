#include "cli/stress_run.h"

#include <algorithm>
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
  const bool forward_alone = c.problem.page_size != 0 || c.problem.left_padding;
  const auto add = [&](const std::string& kernel, Pass pass) {
    if (forward_alone && pass != Pass::forward) return;
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

/// What arrays draw from, one seed after another: what each pass takes, and what the fastest kernels take, since they would
/// see few of the problems of all.
std::vector<std::string> domains_of(const StressOptions& options) {
  if (!options.kernel.empty()) return {options.kernel};
  if (options.device.kind == DeviceKind::cpu) return {"cpu/backward", "cpu/prefill"};
  const std::string fastest = device_info(options.device).arch >= 90 ? "/sm90" : "/sm80";
  return {"backward" + fastest, "forward" + fastest, "decode/sm80", "forward/portable", "backward/portable"};
}

/// The problems one after another: a configuration of each array in turn, so that a short run has seen all kinds.
class Source {
 public:
  explicit Source(const StressOptions& options) : options_(options), domains_(domains_of(options)) {
    const std::size_t count = options.only >= 0 ? 1 : domains_.size();
    for (std::size_t n = 0; n < count; ++n) arrays_.push_back({.seed = options.seed + n});
  }

  bool next(fuzz::GeneratedProblem& problem) {
    Array& array = arrays_[turn_];
    if (array.problems.empty()) fill(array);
    if (options_.only >= 0) {
      if (given_ || options_.only >= static_cast<std::int64_t>(array.problems.size())) return false;
      given_ = true;
      problem = array.problems[static_cast<std::size_t>(options_.only)];
      return true;
    }
    problem = array.problems[array.at++];
    if (array.at % problems_of_configuration == 0) turn_ = (turn_ + 1) % arrays_.size();
    if (array.at == array.problems.size()) array = {.seed = array.seed + arrays_.size()};
    return true;
  }

 private:
  struct Array {
    std::uint64_t seed;
    std::vector<fuzz::GeneratedProblem> problems{};
    std::size_t at = 0;
  };

  void fill(Array& array) const {
    array.problems = fuzz::problems(domains_[array.seed % domains_.size()], problems_of_configuration, array.seed);
  }

  const StressOptions& options_;
  const std::vector<std::string> domains_;
  std::vector<Array> arrays_;
  std::size_t turn_ = 0;
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
  const bool backward = std::any_of(pending.targets.begin(), pending.targets.end(),
                                    [](const testing::Target& target) { return testing::is_backward(target.pass); });
  pending.expected = std::async(std::launch::async, [c = problem.c, backward] { return testing::expect(c, backward); });
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
    report_.last_seed = std::max(report_.last_seed, pending.problem.seed);
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
