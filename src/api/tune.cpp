#include "flash_attention/tune.h"

#include <algorithm>
#include <chrono>
#include <optional>

#include "api/backends.h"
#include "api/checks/refuse.h"
#include "api/checks/validate.h"
#include "api/guard.h"
#include "flash_attention/error.h"
#include "plan/kernel_table.h"
#include "support/ceil_div.h"
#include "tuning/cases.h"
#include "tuning/store.h"
#include "tuning/tuner.h"

namespace flash_attention {
namespace api {
namespace {

std::string driver_of(const Device& device) {
  const Backend& backend = backend_of(device);
  return backend.driver != nullptr ? backend.driver() : std::string();
}

/// The call to measure. With a cache, only the pages that are read count.
tuning::Call call_of(const TuneCase& one) {
  Problem given = one.problem;
  if (given.page_size != 0) {
    const std::int64_t read = given.batch * ceil_div(given.seq_kv, given.page_size);
    given.num_pages = given.num_pages == 0 ? read : std::min(given.num_pages, read);
    given.total_kv = given.page_table_stride = 0;
  }
  if (one.pass != Pass::forward && one.pass != Pass::backward)
    refuse("pass", std::string(to_string(one.pass)), "allowed are forward and backward");
  return {normalise(given, one.pass), one.pass, normalise(given, Pass::forward)};
}

DeviceInfo device_to_tune(const Device& device) {
  if (device_traits(device).emulated) refuse("device", to_string(device), "the times of an emulator say nothing");
  return device_info(device);
}

/// An earlier decision, as a result.
std::optional<TuneResult> decided_before(const TuneCase& one, const tuning::Call& call, const DeviceInfo& device) {
  const auto known = tuning::known(device, driver_of(device.device));
  if (known == nullptr) return std::nullopt;
  const std::vector<plan::Tuned::Entry> entries = known->entries();
  const Problem form = plan::tuning_form(call.problem);
  const auto found = std::ranges::find_if(
      entries, [&](const plan::Tuned::Entry& entry) { return entry.pass == call.pass && entry.problem == form; });
  if (found == entries.end()) return std::nullopt;
  const plan::TunedChoice& tuned = found->tuned;
  TuneResult result{.tuned = one};
  result.usual = tuned.instead_of;
  result.choice = tuned.choice.kernel.empty() ? tuned.instead_of : plan::to_string(tuned.choice);
  result.gain = tuned.gain, result.noise = tuned.noise;
  result.skipped = "tuned before";
  return result;
}

class Session {
 public:
  Session(const DeviceInfo& device, std::span<const TuneCase> cases, const TuneLimits& limits)
      : device_(device), cases_(cases), limits_(limits) {}

  TuneReport run() {
    for (std::size_t i = 0; i < cases_.size(); ++i) {
      if (stops()) {
        report_.finished = false;
        break;
      }
      if (limits_.progress)
        limits_.progress({i, cases_.size(), std::string(to_string(cases_[i].pass)) + " of " + to_string(cases_[i].problem),
                          elapsed()});
      add(one(cases_[i], cases_.size() - i));
    }
    return std::move(report_);
  }

 private:
  double elapsed() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }
  bool stops() const { return elapsed() >= limits_.seconds || (limits_.stops && limits_.stops()); }

  void add(TuneResult result) {
    if (limits_.result) limits_.result(result);
    report_.results.push_back(std::move(result));
  }

  TuneResult one(const TuneCase& given, std::size_t left) {
    try {
      const tuning::Call call = call_of(given);
      if (!limits_.again) {
        if (auto before = decided_before(given, call, device_)) return *std::move(before);
      }
      const Backend& backend = backend_of(device_.device);
      const double share = (limits_.seconds - elapsed()) / static_cast<double>(left);
      tuning::TunedCase tuned = tuning::tune_case(call, device_, backend, tuning::tools_of(device_, backend),
                                              std::clamp(share / 3, 0.05, 3.0), [this] { return stops(); });
      tuned.result.tuned = given;
      if (tuned.decided) {
        if (tuned.choice.choice.kernel.empty()) tuned.choice.instead_of = tuned.result.usual;
        report_.path = tuning::remember(device_, driver_of(device_.device),
                                      {{plan::tuning_form(call.problem), call.pass, tuned.choice}}, {})
                           .string();
      } else if (tuned.result.skipped.empty()) {
        tuned.result.skipped = "no time was left";
        report_.finished = false;
      }
      return std::move(tuned.result);
    } catch (const Error& error) {
      if (error.code() == ErrorCode::device_failed || error.code() == ErrorCode::internal) throw;
      TuneResult result{.tuned = given};
      result.skipped = error.what();
      return result;
    }
  }

  const DeviceInfo& device_;
  std::span<const TuneCase> cases_;
  const TuneLimits& limits_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  TuneReport report_;
};

}  // namespace
}  // namespace api

TuneReport tune(Device device, std::span<const TuneCase> cases, const TuneLimits& limits) {
  return api::guarded([&] {
    const DeviceInfo info = api::device_to_tune(device);
    return api::Session(info, cases, limits).run();
  });
}

std::size_t compile_for_tuning(Device device, std::span<const TuneCase> cases) {
  return api::guarded([&] {
    const DeviceInfo info = api::device_to_tune(device);
    std::vector<tuning::Call> calls;
    for (const TuneCase& one : cases) calls.push_back(api::call_of(one));
    return tuning::load_alternatives(calls, info, api::backend_of(device));
  });
}

std::vector<TuneResult> time_cases(Device device, std::span<const TuneCase> cases, double seconds) {
  return api::guarded([&] {
    const DeviceInfo info = api::device_to_tune(device);
    std::vector<TuneResult> results;
    for (const TuneCase& one : cases) {
      const tuning::Call call = api::call_of(one);
      TuneResult& result = results.emplace_back();
      result.tuned = one;
      result.skipped = tuning::unmeasurable(call.problem);
      if (!result.skipped.empty()) continue;
      const Plan plan = plan::choose(call.problem, call.pass, info);
      result.choice = plan.tuned.empty() ? plan.kernel + ", " + std::to_string(plan.block_q) + " x " + std::to_string(plan.block_kv)
                                         : plan.tuned;
      result.seconds = tuning::time_plan(call, plan, info, api::backend_of(device), seconds);
    }
    return results;
  });
}

std::vector<TuneCase> parse_tune_cases(std::string_view text, const std::string& name) {
  return api::guarded([&] { return tuning::parse_cases(text, name); });
}

std::vector<TuneCase> usual_tune_cases(const DeviceInfo& device) {
  return api::guarded([&] { return tuning::usual_cases(device); });
}

std::string export_tuned(Device device) {
  return api::guarded([&] {
    const DeviceInfo info = device_info(device);
    const std::string driver = api::driver_of(device);
    tuning::TunedFile file{.place = tuning::place_of(info, driver), .entries = {}, .verdicts = {}};
    if (const auto known = tuning::known(info, driver)) file.entries = known->entries();
    return tuning::to_text(file);
  });
}

std::size_t import_tuned(Device device, std::string_view text, const std::string& name) {
  return api::guarded([&] {
    const DeviceInfo info = device_info(device);
    const std::string driver = api::driver_of(device);
    const tuning::TunedFile file = tuning::parse_tuned(text, name);
    tuning::require_place(file, tuning::place_of(info, driver), name);
    tuning::remember(info, driver, file.entries, {});  // self-tests are valid on one machine only
    return file.entries.size();
  });
}

}  // namespace flash_attention
