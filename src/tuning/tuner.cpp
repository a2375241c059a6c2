#include "tuning/tuner.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <future>
#include <limits>
#include <mutex>
#include <set>
#include <thread>

#include "flash_attention/error.h"
#include "plan/kernel_table.h"
#include "tuning/contest.h"

namespace flash_attention::tuning {
namespace {

/// One way to make the call, and its results.
struct Contestant {
  const Problem& problem;
  plan::Alternative alternative;
  std::unique_ptr<Kernel> kernel{};
  std::string wrong{};  // why it is out of the contest
  bool checked = false;
};

/// Loads all contestants, as many at a time as there are cores, because most of them must be compiled first.
void load_all(std::vector<Contestant>& contestants, const Tools& tools, const std::function<bool()>& stops) {
  std::atomic<std::size_t> next{0};
  std::atomic<bool> stopped{false};
  std::mutex mutex;
  std::exception_ptr fatal;
  const auto work = [&] {
    for (std::size_t i = next++; i < contestants.size(); i = next++) {
      Contestant& one = contestants[i];
      try {
        if (stopped && i != 0) {
          one.wrong = "no time was left";
        } else {
          one.kernel = tools.load(one.problem, one.alternative.plan);
        }
      } catch (const Error& error) {
        const std::string_view message = error.what();
        one.wrong = message.substr(0, message.find('\n'));
        const std::lock_guard lock(mutex);
        if (i == 0 || error.code() == ErrorCode::device_failed) fatal = std::current_exception();
      }
    }
  };
  std::vector<std::future<void>> workers;
  for (unsigned i = 0; i < std::max(1u, std::thread::hardware_concurrency()); ++i)
    workers.push_back(std::async(std::launch::async, work));
  for (std::future<void>& worker : workers) {  // only this thread calls `stops`
    while (worker.wait_for(std::chrono::milliseconds(20)) != std::future_status::ready) stopped = stopped || (stops && stops());
    worker.get();
  }
  if (fatal) std::rethrow_exception(fatal);
}

/// The part of the choice that is also in the plan.
std::string name_of(const plan::Alternative& alternative) {
  plan::Choice choice = alternative.choice;
  if (choice.block_q == 0) choice.block_q = alternative.plan.block_q, choice.block_kv = alternative.plan.block_kv;
  return plan::to_string(choice);
}

/// Runs the forward pass before a backward pass.
void prepare_backward(Rig& rig, const Call& call, const DeviceInfo& device, const Backend& backend) {
  if (call.pass != Pass::backward) return;
  DeviceInfo by_rules = device;
  by_rules.tuned.reset();
  const Plan forward = plan::choose(call.forward, Pass::forward, by_rules);
  rig.run(*backend.load(call.forward, forward, device, nullptr), forward);
}

}  // namespace

Tools tools_of(const DeviceInfo& device, const Backend& backend) {
  return {.load = [device, &backend](const Problem& problem,
                                     const Plan& plan) { return backend.load(problem, plan, device, nullptr); },
          .seconds = [](Rig& rig, const Kernel& kernel,
                        const plan::Alternative& alternative) { return rig.seconds(kernel, alternative.plan); }};
}

std::size_t load_alternatives(const std::vector<Call>& calls, const DeviceInfo& device, const Backend& backend) {
  std::vector<Contestant> contestants;
  std::set<std::string> known;  // calls of other sizes often need the same kernels
  for (const Call& call : calls) {
    if (!unmeasurable(call.problem).empty()) continue;
    for (plan::Alternative& alternative : plan::alternatives(call.problem, call.pass, device)) {
      std::string kernels;
      for (const Launch& launch : alternative.plan.launches)
        kernels += launch.unit + launch.entry + to_source(launch.config) + std::to_string(launch.block) + '\n';
      if (known.insert(std::move(kernels)).second) contestants.push_back({call.problem, std::move(alternative)});
    }
  }
  load_all(contestants, tools_of(device, backend), {});
  return static_cast<std::size_t>(
      std::ranges::count_if(contestants, [](const Contestant& one) { return one.kernel != nullptr; }));
}

TunedCase tune_case(const Call& call, const DeviceInfo& device, const Backend& backend, const Tools& tools, double seconds,
                    const std::function<bool()>& stops) {
  TunedCase tuned;
  TuneResult& result = tuned.result;
  result.tuned = {call.problem, call.pass};
  result.skipped = unmeasurable(call.problem);
  if (result.skipped.empty() && call.problem.invariant) result.skipped = "its bits must not depend on what was measured";
  if (!result.skipped.empty()) return tuned;

  std::vector<Contestant> contestants;
  for (plan::Alternative& alternative : plan::alternatives(call.problem, call.pass, device))
    contestants.push_back({call.problem, std::move(alternative)});
  result.usual = result.choice = name_of(contestants[0].alternative);
  load_all(contestants, tools, stops);

  Rig rig(call, device, backend, Inputs::usual);
  prepare_backward(rig, call, device, backend);
  const auto results_of = [&](const Contestant& one, std::int64_t most) {
    rig.clear_results();
    rig.run(*one.kernel, one.alternative.plan);
    return rig.results(most);
  };
  constexpr std::int64_t some = 1 << 20, all = std::int64_t{1} << 40;  // all values of the winner are compared
  const std::vector<Result> expected = results_of(contestants[0], some);
  contestants[0].checked = true;
  const auto sample = [&](int i) {
    Contestant& one = contestants[static_cast<std::size_t>(i)];
    if (one.wrong.empty() && !one.checked) one.wrong = difference(call.problem, results_of(one, some), expected);
    one.checked = true;
    return one.wrong.empty() ? tools.seconds(rig, *one.kernel, one.alternative) : std::numeric_limits<double>::infinity();
  };
  ContestLimits limits{.seconds = seconds, .stops = stops};
  const auto hold = [&] { return hold_contest(static_cast<int>(contestants.size()), sample, limits); };
  Outcome outcome = hold();
  while (outcome.winner != 0) {
    Contestant& winner = contestants[static_cast<std::size_t>(outcome.winner)];
    const std::vector<Result> whole = results_of(contestants[0], all);
    winner.wrong = difference(call.problem, results_of(winner, all), whole);
    if (winner.wrong.empty()) break;
    outcome = hold();  // without it
  }

  for (const Contestant& one : contestants) {
    if (one.wrong.empty()) {
      ++result.contestants;
    } else {
      result.dropped.push_back(name_of(one.alternative) + ": " + one.wrong);
    }
  }
  result.usual_seconds = outcome.default_seconds, result.seconds = outcome.seconds;
  result.gain = outcome.gain, result.noise = outcome.noise;
  tuned.decided = outcome.finished;
  if (!outcome.finished || outcome.winner == 0) return tuned;
  const plan::Alternative& winner = contestants[static_cast<std::size_t>(outcome.winner)].alternative;
  result.choice = name_of(winner);
  tuned.choice = {.choice = winner.choice, .instead_of = result.usual, .gain = outcome.gain, .noise = outcome.noise};
  return tuned;
}

double time_plan(const Call& call, const Plan& plan, const DeviceInfo& device, const Backend& backend, double seconds) {
  Rig rig(call, device, backend, Inputs::usual);
  prepare_backward(rig, call, device, backend);
  const std::unique_ptr<Kernel> kernel = backend.load(call.problem, plan, device, nullptr);
  rig.run(*kernel, plan);
  std::vector<double> samples;
  for (double total = 0; (total < seconds && samples.size() < 200) || samples.size() < 5; total += samples.back())
    samples.push_back(rig.seconds(*kernel, plan));
  std::ranges::sort(samples);
  return samples[samples.size() / 2];
}

}  // namespace flash_attention::tuning
