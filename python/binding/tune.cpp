#include "flash_attention/tune.h"

#include <nanobind/stl/string.h>

#include "gil.h"
#include "tune.h"

namespace flash_attention::python {

namespace nb = nanobind;

namespace {

nb::dict to_dict(const TuneResult& result) {
  nb::dict fields;
  fields["pass"] = std::string(to_string(result.tuned.pass));
  fields["problem"] = to_string(result.tuned.problem);
  fields["usual"] = result.usual;
  fields["choice"] = result.choice;
  fields["usual_seconds"] = result.usual_seconds;
  fields["seconds"] = result.seconds;
  fields["gain"] = result.gain;
  fields["noise"] = result.noise;
  nb::list dropped;
  for (const std::string& one : result.dropped) dropped.append(one);
  fields["dropped"] = dropped;
  fields["skipped"] = result.skipped;
  return fields;
}

Device device_of(const std::string& text) { return text.empty() ? best_device() : parse_device(text); }

/// The cases of the text, or the common ones if there is no text.
std::vector<TuneCase> cases_of(const Device& device, const std::string& text, const std::string& name) {
  return text.empty() ? usual_tune_cases(device_info(device)) : parse_tune_cases(text, name);
}

/// Calls `progress(done, of, what, seconds)` between cases. Control-C stops it; measurements so far are kept.
nb::list tune_here(const std::string& device_text, const std::string& text, const std::string& name, double budget, bool again,
                   nb::handle progress) {
  const Device device = device_of(device_text);
  const std::vector<TuneCase> cases = cases_of(device, text, name);
  bool raised = false;  // a Python exception is pending
  TuneReport report;
  {
    const GilRelease released;
    TuneLimits limits{.seconds = budget, .again = again};
    limits.stops = [&] {
      const nb::gil_scoped_acquire held;
      raised = raised || PyErr_CheckSignals() != 0;
      return raised;
    };
    if (!progress.is_none()) {
      limits.progress = [&](const TuneProgress& now) {
        const nb::gil_scoped_acquire held;
        try {
          if (!raised) progress(now.done, now.of, now.now, now.seconds);
        } catch (nb::python_error& error) {
          error.restore();
          raised = true;
        }
      };
    }
    report = tune(device, cases, limits);
  }
  if (raised) throw nb::python_error();
  nb::list results;
  for (const TuneResult& result : report.results) results.append(to_dict(result));
  return results;
}

}  // namespace

void add_tune(nb::module_& module) {
  using namespace nb::literals;
  module.def("tune", tune_here, "device"_a, "text"_a, "name"_a, "budget"_a, "again"_a, "progress"_a.none());
  module.def(
      "export_tuned", [](const std::string& device) { return export_tuned(device_of(device)); }, "device"_a);
  module.def(
      "import_tuned",
      [](const std::string& device, const std::string& text, const std::string& name) {
        return import_tuned(device_of(device), text, name);
      },
      "device"_a, "text"_a, "name"_a);
}

}  // namespace flash_attention::python
