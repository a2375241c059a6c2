#pragma once

#include <nanobind/nanobind.h>

namespace flash_attention::python {

/// Adds tune(), time_cases(), export_tuned() and import_tuned() to the module.
void add_tune(nanobind::module_& module);

}  // namespace flash_attention::python
