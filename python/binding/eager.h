#pragma once

#include <nanobind/nanobind.h>

namespace flash_attention::python {

/// Adds attend(), the short way of a plain torch call, what it needs for a gradient, and set_eager(), which says what torch
/// is.
void add_eager(nanobind::module_& module);

}  // namespace flash_attention::python
