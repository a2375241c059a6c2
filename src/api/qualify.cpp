#include "api/qualify.h"

#include <algorithm>
#include <mutex>
#include <string>

#include "api/backends.h"
#include "api/checks/validate.h"
#include "flash_attention/error.h"
#include "plan/kernel_table.h"
#include "support/log.h"
#include "support/settings.h"
#include "tuning/self_test.h"
#include "tuning/store.h"

namespace flash_attention::api {
namespace {

using support::Qualify;

std::string driver_version(const Backend& backend) { return backend.driver != nullptr ? backend.driver() : std::string(); }

tuning::Call call_with(const Problem& problem, Pass pass) {
  return {normalise(problem, pass), pass, normalise(problem, Pass::forward)};
}

plan::Verdict test(const Problem& problem, const Plan& plan, const DeviceInfo& device, const Backend& backend) {
  const Backend& host_backend = backend_of(Device{});
  const tuning::Machine machine{device, backend}, host{host_backend.info(Device{}), host_backend};
  std::vector<tuning::Call> calls;
  for (const Problem& hostile : tuning::hostile_problems(plan.pass)) calls.push_back(call_with(hostile, plan.pass));
  const tuning::Call timed = call_with(tuning::timed_problem(problem), plan.pass);
  DeviceInfo proven = device;
  proven.proven_only = true;
  const std::string stand_in = plan::choose(timed.problem, plan.pass, proven).kernel;
  return tuning::self_test(plan.kernel, plan.pass, calls, &timed, stand_in, machine, host,
                           [&](const Problem& of, const Plan& made) { return backend.load(of, made, device, nullptr); });
}

}  // namespace

bool qualify(const Problem& problem, const Plan& plan, const DeviceInfo& device) {
  const Backend& backend = backend_of(device.device);
  const Qualify when = support::settings().qualify;
  if (!plan.unproven || when == Qualify::never || (backend.traits.emulated && when != Qualify::always)) return false;
  static std::mutex& one_at_a_time = *new std::mutex;  // never destroyed, like the cache of plans
  const std::lock_guard lock(one_at_a_time);
  const std::string driver = driver_version(backend);
  const auto known = tuning::known(device, driver);
  if (known != nullptr && known->verdict(plan.kernel, plan.pass) != nullptr) return true;  // from another thread
  const std::string name = plan.kernel + " (" + std::string(to_string(plan.pass)) + ")";
  support::log("flash_attention: " + name + " was never run on sm_" + std::to_string(device.arch) +
               ": it is tested on " + device.name + " now, once");
  // If the test ends the process or the GPU's work, that is a verdict, too: the next process reads it.
  tuning::keep_on_disk(device, driver, {plan.kernel, plan.pass, false, "its self-test did not come to an end"});
  try {
    const plan::Verdict verdict = test(problem, plan, device, backend);
    if (!verdict.passed)
      support::log("flash_attention: " + name + " is not used on " + device.name + ": " + verdict.reason);
    tuning::remember(device, driver, {}, {verdict});
    return true;
  } catch (const Error& error) {
    tuning::take_from_disk(device, driver, plan.kernel, plan.pass);
    support::log("flash_attention: " + name + " could not be tested: " + error.what());
    return false;
  }
}

std::vector<Finding> verdicts_on(const DeviceInfo& device) {
  std::vector<Finding> findings;
  const Backend& backend = backend_of(device.device);
  const auto known = tuning::known(device, driver_version(backend));
  for (const plan::KernelEntry& entry : plan::kernel_table()) {
    if (!device_traits(entry.device).gpu_kernels || !entry.automatic || !plan::is_unproven(entry, device)) continue;
    const plan::Verdict* const verdict = known != nullptr ? known->verdict(entry.name, entry.pass) : nullptr;
    if (verdict == nullptr) continue;  // never tested here
    findings.push_back({.subject = std::string(entry.name) + " on " + to_string(device.device),
                        .ok = verdict->passed,
                        .detail = verdict->passed ? "passed its self-test, since it was never run on sm_" +
                                                        std::to_string(device.arch) + " before"
                                                  : "failed its self-test and is not used: " + verdict->reason,
                        .advice = verdict->passed ? "" : "please report this; FLASH_ATTENTION_QUALIFY=force tests it again"});
  }
  return findings;
}

}  // namespace flash_attention::api
