#include "diagnosis.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include "flash_attention/runtime.h"

namespace flash_attention::python {

namespace nb = nanobind;

namespace {

nb::dict to_dict(const DeviceInfo& info) {
  nb::dict fields;
  fields["device"] = to_string(info.device);
  fields["name"] = info.name;
  fields["memory_bytes"] = info.memory_bytes;
  fields["l2_bytes"] = info.l2_bytes;
  if (!device_traits(info.device).gpu_kernels) {
    fields["isa"] = to_string(info.isa);
    fields["threads"] = info.threads;
    fields["core_cache_bytes"] = info.core_cache_bytes;
  } else {
    fields["arch"] = info.arch;
    fields["num_sms"] = info.num_sms;
    fields["shared_bytes"] = info.shared_bytes;
  }
  return fields;
}

nb::list device_list() {
  nb::list list;
  for (const DeviceInfo& info : devices()) {
    list.append(to_dict(info));
  }
  return list;
}

nb::list kernel_list() {
  nb::list list;
  for (const KernelSummary& kernel : kernels()) {
    nb::dict fields;
    fields["name"] = kernel.name;
    fields["pass"] = to_string(kernel.pass);
    fields["device"] = to_string(kernel.device);
    nb::list proven;
    for (const int arch : kernel.proven) proven.append(arch);
    fields["proven"] = proven;
    fields["requirements"] = kernel.requirements;
    list.append(fields);
  }
  return list;
}

nb::list finding_list() {
  nb::list list;
  for (const Finding& finding : diagnose()) {
    nb::dict fields;
    fields["subject"] = finding.subject;
    fields["ok"] = finding.ok;
    fields["detail"] = finding.detail;
    fields["advice"] = finding.advice;
    list.append(fields);
  }
  return list;
}

nb::list cache_list() {
  nb::list list;
  for (const CacheEntry& entry : cache_entries()) {
    nb::dict fields;
    fields["path"] = entry.path;
    fields["kernel"] = entry.kernel;
    fields["bytes"] = entry.bytes;
    fields["intact"] = entry.intact;
    list.append(fields);
  }
  return list;
}

/// Passes a message of the library to the Python callable in `context`, from any thread.
void log_to_python(std::string_view message, void* context) {
  nb::gil_scoped_acquire held;
  try {
    nb::handle(static_cast<PyObject*>(context))(message);
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("flash_attention log callback");
  }
}

}  // namespace

void add_diagnosis(nb::module_& module) {
  using namespace nb::literals;
  module.def("devices", device_list);
  module.def("kernels", kernel_list);
  module.def("diagnose", finding_list);
  module.def("invariant_by_default", &invariant_by_default);
  module.def("cache_directory", &cache_directory);
  module.def("cache_entries", cache_list);
  module.def("clear_cache", &clear_cache);
  module.def(
      "set_log",
      [](nb::object callable) {
        set_log_callback(log_to_python, callable.release().ptr());  // kept for the life of the process
      },
      "callable"_a);
}

}  // namespace flash_attention::python
