#pragma once

#include <nanobind/nanobind.h>

namespace flash_attention::python {

/// Adds devices(), kernels(), diagnose(), the cache functions and the log to the module.
void add_diagnosis(nanobind::module_& module);

}  // namespace flash_attention::python
